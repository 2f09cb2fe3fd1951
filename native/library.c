#define _GNU_SOURCE
#include "nixl_api.h"
#include "sluice_native.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int sluice_native_abi(void) { return SLUICE_NATIVE_ABI; }

int sluice_native_resident(const char *soname) {
  if (soname == NULL || soname[0] == '\0') {
    return -1;
  }
  void *h = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (h == NULL) {
    return 0;
  }
  dlclose(h); /* NOLOAD took a reference */
  return 1;
}

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct nixl_api table;
static char loaded_from[4096];
static _Atomic(const struct nixl_api *) ready;

const struct nixl_api *sluice_nixl_api(void) { return atomic_load_explicit(&ready, memory_order_acquire); }

void sluice_ucx_environment(void) {
  /* C's setenv: UCX reads the C environment in its constructor. */
  setenv("UCX_DEBUG_SIGNO", "0", 1);       /* else it takes SIGHUP, on Go's stacks */
  setenv("UCX_HANDLE_ERRORS", "none", 1);  /* else, before 1.20, it takes SIGSEGV and others */
  setenv("UCX_MEM_EVENTS", "n", 1);        /* else it patches mmap, munmap, madvise in place */
  setenv("UCX_LOG_FILE", "stderr", 0);     /* else its log goes to stdout; an operator's file stays */
}

/* The file that the loader resolved h to, and its soname ("" when it has none). */
static void identify(void *h, char *file, size_t file_len, char *soname, size_t soname_len) {
  struct link_map *map = NULL;
  file[0] = soname[0] = '\0';
  if (dlinfo(h, RTLD_DI_LINKMAP, &map) != 0 || map == NULL) {
    return;
  }
  snprintf(file, file_len, "%s", map->l_name);
  const char *strings = NULL;
  size_t offset = 0;
  for (const ElfW(Dyn) *d = map->l_ld; d != NULL && d->d_tag != DT_NULL; d++) {
    if (d->d_tag == DT_STRTAB) {
      strings = (const char *)d->d_un.d_ptr; /* relocated by glibc */
    } else if (d->d_tag == DT_SONAME) {
      offset = (size_t)d->d_un.d_val;
    }
  }
  if (strings != NULL && offset != 0) {
    snprintf(soname, soname_len, "%s", strings + offset);
  }
}

static int lookup(void *h, const char *name, void *slot) {
  void *p = dlsym(h, name);
  memcpy(slot, &p, sizeof p); /* ISO C has no cast from an object to a function pointer */
  return p != NULL;
}

static int load_locked(const char *path, char *why, size_t why_len) {
  if (strchr(path, '/') != NULL && access(path, F_OK) != 0) {
    snprintf(why, why_len, "%s: no such file", path);
    return SLUICE_LOAD_ABSENT;
  }
  if (sluice_nixl_api() != NULL) {
    void *again = dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
    if (again == NULL) {
      snprintf(why, why_len, "%s is loaded already, and a process holds one NIXL only", loaded_from);
      return SLUICE_LOAD_OTHER;
    }
    char file[sizeof loaded_from], soname[256];
    identify(again, file, sizeof file, soname, sizeof soname);
    dlclose(again);
    if (strcmp(file, loaded_from) != 0) {
      snprintf(why, why_len, "%s is loaded already, and a process holds one NIXL only", loaded_from);
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
    /* A bare name that is nowhere on the loader's path is simply not there. */
    return strchr(path, '/') == NULL && strncmp(why, path, strlen(path)) == 0 ? SLUICE_LOAD_ABSENT : SLUICE_LOAD_BROKEN;
  }
  sluice_signals_restore();
  char file[sizeof loaded_from], soname[256];
  identify(h, file, sizeof file, soname, sizeof soname);
  /* 0.10 to 1.5 carry no version in the soname; .so.0 is the announced first. */
  const char *version = strstr(soname, ".so.");
  if (version != NULL && strcmp(version, ".so.0") != 0) {
    snprintf(why, why_len, "%s is %s: this program knows libnixl_capi.so and libnixl_capi.so.0", file, soname);
    return SLUICE_LOAD_TOO_NEW; /* not closed again: its threads, if any, run in it */
  }
  struct nixl_api t;
  memset(&t, 0, sizeof t);
#define X(result, name, args)                                                          \
  if (!lookup(h, "nixl_capi_" #name, &t.name)) {                                       \
    snprintf(why, why_len, "%s lacks nixl_capi_" #name ": not NIXL 0.10 or newer", file); \
    return SLUICE_LOAD_SYMBOL;                                                         \
  }
  NIXL_REQUIRED(X)
#undef X
#define X(result, name, args) (void)lookup(h, "nixl_capi_" #name, &t.name);
  NIXL_OPTIONAL(X)
#undef X
  if (t.is_stub != NULL && t.is_stub()) {
    snprintf(why, why_len, "%s is NIXL's stub, built without NIXL behind it", file);
    return SLUICE_LOAD_STUB;
  }
  table = t;
  snprintf(loaded_from, sizeof loaded_from, "%s", file);
  atomic_store_explicit(&ready, &table, memory_order_release);
  snprintf(why, why_len, "%s", file);
  return SLUICE_LOAD_OK;
}

struct load_job {
  int (*load)(const char *path, char *why, size_t why_len);
  const char *path;
  char *why;
  size_t why_len;
  int result;
};

static void *load_main(void *p) {
  struct load_job *j = p;
  pthread_mutex_lock(&load_lock);
  j->result = j->load(j->path, j->why, j->why_len);
  pthread_mutex_unlock(&load_lock);
  return NULL;
}

static int load_in_thread(int (*load)(const char *, char *, size_t), const char *path, char *why, size_t why_len) {
  struct load_job job = {load, path, why, why_len, SLUICE_LOAD_THREAD};
  sigset_t all, old;
  pthread_t t;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int e = pthread_create(&t, NULL, load_main, &job);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (e != 0) {
    snprintf(why, why_len, "cannot start a thread to load it in: %s", strerror(e));
    return SLUICE_LOAD_THREAD;
  }
  pthread_join(t, NULL);
  return job.result;
}

int sluice_nixl_load(const char *path, char *why, size_t why_len) {
  if (why == NULL || why_len == 0) {
    return SLUICE_LOAD_BROKEN;
  }
  why[0] = '\0';
  if (path == NULL || path[0] == '\0') {
    snprintf(why, why_len, "an empty path");
    return SLUICE_LOAD_ABSENT;
  }
  return load_in_thread(load_locked, path, why, why_len);
}

int sluice_ucx_load(const char *path, char *why, size_t why_len) {
  if (why == NULL || why_len == 0) {
    return SLUICE_LOAD_BROKEN;
  }
  why[0] = '\0';
  return load_in_thread(sluice_ucx_load_here, path != NULL ? path : "", why, why_len);
}

int sluice_ucx_version(const char *path, unsigned *major, unsigned *minor, unsigned *patch) {
  void *h = dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (h == NULL) {
    return 0;
  }
  void (*version)(unsigned *, unsigned *, unsigned *) = NULL;
  int ok = lookup(h, "ucp_get_version", &version);
  if (ok) {
    version(major, minor, patch);
  }
  dlclose(h);
  return ok;
}

void *sluice_alloc(size_t n) { return malloc(n); }
void sluice_free(void *p) { free(p); }
