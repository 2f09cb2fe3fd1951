/* Finds and loads libnixl_capi. */
#define _GNU_SOURCE
#include "dl/dl.h"
#include "nixl/api.h"
#include "nixl/nixl.h"
#include "ucx/ucx.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct nixl_api table;
static char loaded_from[4096];
static _Atomic(const struct nixl_api *) ready;

const struct nixl_api *sluice_nixl_api(void) { return atomic_load_explicit(&ready, memory_order_acquire); }

static int load(const char *path, char *why, size_t why_len) {
  if (strchr(path, '/') != NULL && access(path, F_OK) != 0) {
    snprintf(why, why_len, "%s: no such file", path);
    return SLUICE_LOAD_ABSENT;
  }
  if (sluice_nixl_api() != NULL) {
    void *again = dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
    if (again == NULL) {
      snprintf(why, why_len, "%s is loaded already; a process can load one NIXL only", loaded_from);
      return SLUICE_LOAD_OTHER;
    }
    char file[sizeof loaded_from], soname[256];
    sluice_dl_identify(again, file, sizeof file, soname, sizeof soname);
    dlclose(again);
    if (strcmp(file, loaded_from) != 0) {
      snprintf(why, why_len, "%s is loaded already; a process can load one NIXL only", loaded_from);
      return SLUICE_LOAD_OTHER;
    }
    snprintf(why, why_len, "%s", loaded_from);
    return SLUICE_LOAD_OK;
  }
  sluice_ucx_environment();
  sluice_signals_remember();
  (void)dlerror();
  void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (h == NULL) {
    const char *e = dlerror();
    snprintf(why, why_len, "%s", e != NULL ? e : "dlopen failed without a reason");
    /* A bare name that the loader does not find is absent, not broken. */
    return strchr(path, '/') == NULL && strncmp(why, path, strlen(path)) == 0 ? SLUICE_LOAD_ABSENT : SLUICE_LOAD_BROKEN;
  }
  sluice_signals_restore();
  char file[sizeof loaded_from], soname[256];
  sluice_dl_identify(h, file, sizeof file, soname, sizeof soname);
  /* The soname of 0.10 to 1.5 has no version; .so.0 is announced as the first. */
  const char *version = strstr(soname, ".so.");
  if (version != NULL && strcmp(version, ".so.0") != 0) {
    snprintf(why, why_len, "%s has the soname %s; supported are libnixl_capi.so and libnixl_capi.so.0", file, soname);
    return SLUICE_LOAD_TOO_NEW; /* not closed: threads that it started may run in it */
  }
  struct nixl_api t;
  memset(&t, 0, sizeof t);
#define X(result, name, args)                                                          \
  if (!sluice_dl_symbol(h, "nixl_capi_" #name, &t.name)) {                                       \
    snprintf(why, why_len, "%s lacks nixl_capi_" #name ": want NIXL 0.10 or newer", file); \
    return SLUICE_LOAD_SYMBOL;                                                         \
  }
  NIXL_REQUIRED(X)
#undef X
#define X(result, name, args) (void)sluice_dl_symbol(h, "nixl_capi_" #name, &t.name);
  NIXL_OPTIONAL(X)
#undef X
  if (t.is_stub != NULL && t.is_stub()) {
    snprintf(why, why_len, "%s is NIXL's stub, which was built without NIXL", file);
    return SLUICE_LOAD_STUB;
  }
  table = t;
  snprintf(loaded_from, sizeof loaded_from, "%s", file);
  atomic_store_explicit(&ready, &table, memory_order_release);
  snprintf(why, why_len, "%s", file);
  return SLUICE_LOAD_OK;
}

int sluice_nixl_load(const char *path, char *why, size_t why_len) {
  if (why == NULL || why_len == 0) {
    return SLUICE_LOAD_BROKEN;
  }
  why[0] = '\0';
  if (path == NULL || path[0] == '\0') {
    snprintf(why, why_len, "the path is empty");
    return SLUICE_LOAD_ABSENT;
  }
  return sluice_dl_load_in_thread(load, path, why, why_len);
}
