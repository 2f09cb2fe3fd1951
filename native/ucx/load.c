/* Finds and loads libucp. If one is mapped into the process already, it is used:
 * a second copy in one process hangs or crashes. */
#define _GNU_SOURCE
#include "dl/dl.h"
#include "ucx/api.h"
#include "ucx/ucx.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct ucx_api table;
static _Atomic(const struct ucx_api *) ready;
static char loaded_from[PATH_MAX];

const struct ucx_api *sluice_ucx_api(void) { return atomic_load_explicit(&ready, memory_order_acquire); }

void sluice_ucx_environment(void) {
  /* setenv of libc, not of Go: UCX reads the C environment in its constructor. */
  setenv("UCX_DEBUG_SIGNO", "0", 1);       /* else it installs a SIGHUP handler, which would run on Go's stacks */
  setenv("UCX_HANDLE_ERRORS", "none", 1);  /* else, before 1.20, it handles SIGSEGV and others */
  setenv("UCX_MEM_EVENTS", "n", 1);        /* else it patches mmap, munmap and madvise in place */
  setenv("UCX_LOG_FILE", "stderr", 0);     /* else it logs to stdout; an operator's value stays */
}

static int is_libucp(const char *path) {
  const char *slash = strrchr(path, '/');
  const char *base = slash != NULL ? slash + 1 : path;
  return strncmp(base, "libucp.", 7) == 0 || strncmp(base, "libucp-", 7) == 0; /* wheels add a hash */
}

static int look(struct dl_phdr_info *info, size_t size, void *p) {
  (void)size;
  char *found = p;
  if (found[0] == '\0' && info->dlpi_name != NULL && is_libucp(info->dlpi_name)) {
    snprintf(found, PATH_MAX, "%s", info->dlpi_name);
  }
  return 0;
}

/* Reports whether two paths name one file. */
static int same_file(const char *a, const char *b) {
  char ra[PATH_MAX], rb[PATH_MAX];
  return realpath(a, ra) != NULL && realpath(b, rb) != NULL && strcmp(ra, rb) == 0;
}

static int fill(void *h, struct ucx_api *t, const char *file, char *why, size_t why_len) {
  memset(t, 0, sizeof *t);
#define X(result, name, args)                                                                        \
  {                                                                                                  \
    if (!sluice_dl_symbol(h, "ucp_" #name, &t->name)) {                                              \
      snprintf(why, why_len, "%s lacks ucp_" #name ": want UCX 1.13 or newer", file);                 \
      return SLUICE_LOAD_SYMBOL;                                                                     \
    }                                                                                                \
  }
  UCX_REQUIRED(X)
#undef X
  t->get_version(&t->major, &t->minor, &t->patch);
  if (t->major > UCX_API_MAJOR) {
    snprintf(why, why_len, "%s is UCX %u.%u.%u: want 1.13 or newer of UCX 1", file, t->major, t->minor, t->patch);
    return SLUICE_LOAD_TOO_NEW;
  }
  if (t->major < UCX_API_MAJOR || t->minor < UCX_API_MINOR) {
    snprintf(why, why_len, "%s is UCX %u.%u.%u: want 1.13 or newer", file, t->major, t->minor, t->patch);
    return SLUICE_LOAD_SYMBOL;
  }
  return SLUICE_LOAD_OK;
}

static int load(const char *path, char *why, size_t why_len) {
  char resident[PATH_MAX] = "";
  dl_iterate_phdr(look, resident);
  if (sluice_ucx_api() != NULL) {
    if (path[0] != '\0' && !same_file(path, loaded_from)) {
      snprintf(why, why_len, "%s is loaded already; a process can load one UCX only", loaded_from);
      return SLUICE_LOAD_OTHER;
    }
    snprintf(why, why_len, "%s", loaded_from);
    return SLUICE_LOAD_OK;
  }
  if (resident[0] == '\0' && path[0] == '\0') {
    snprintf(why, why_len, "no libucp is loaded");
    return SLUICE_LOAD_ABSENT;
  }
  if (resident[0] != '\0' && path[0] != '\0' && !same_file(path, resident)) {
    snprintf(why, why_len, "%s is loaded already; a process can load one UCX only", resident);
    return SLUICE_LOAD_OTHER;
  }
  if (resident[0] == '\0' && strchr(path, '/') != NULL && access(path, F_OK) != 0) {
    snprintf(why, why_len, "%s: no such file", path);
    return SLUICE_LOAD_ABSENT;
  }
  sluice_ucx_environment();
  sluice_signals_remember();
  (void)dlerror();
  const char *file = resident[0] != '\0' ? resident : path;
  void *h = dlopen(file, RTLD_NOW | RTLD_LOCAL | (resident[0] != '\0' ? RTLD_NOLOAD : 0));
  if (h == NULL) {
    const char *e = dlerror();
    snprintf(why, why_len, "%s", e != NULL ? e : "dlopen failed without a reason");
    return strchr(path, '/') == NULL && strncmp(why, path, strlen(path)) == 0 ? SLUICE_LOAD_ABSENT : SLUICE_LOAD_BROKEN;
  }
  sluice_signals_restore();
  struct link_map *map = NULL;
  if (dlinfo(h, RTLD_DI_LINKMAP, &map) == 0 && map != NULL) {
    file = map->l_name;
  }
  struct ucx_api t;
  int code = fill(h, &t, file, why, why_len);
  if (code != SLUICE_LOAD_OK) {
    return code; /* not closed: threads that it started may run in it */
  }
  table = t;
  snprintf(loaded_from, sizeof loaded_from, "%s", file);
  atomic_store_explicit(&ready, &table, memory_order_release);
  snprintf(why, why_len, "%s", file);
  return SLUICE_LOAD_OK;
}

int sluice_ucx_load(const char *path, char *why, size_t why_len) {
  if (why == NULL || why_len == 0) {
    return SLUICE_LOAD_BROKEN;
  }
  why[0] = '\0';
  return sluice_dl_load_in_thread(load, path != NULL ? path : "", why, why_len);
}

int sluice_ucx_version(const char *path, unsigned *major, unsigned *minor, unsigned *patch) {
  void *h = dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (h == NULL) {
    return 0;
  }
  void (*version)(unsigned *, unsigned *, unsigned *) = NULL;
  int ok = sluice_dl_symbol(h, "ucp_get_version", &version);
  if (ok) {
    version(major, minor, patch);
  }
  dlclose(h);
  return ok;
}
