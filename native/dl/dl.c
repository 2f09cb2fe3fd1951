#define _GNU_SOURCE
#include "dl/dl.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int sluice_native_abi(void) { return SLUICE_NATIVE_ABI; }

int sluice_dl_resident(const char *soname) {
  if (soname == NULL || soname[0] == '\0') {
    return -1;
  }
  void *h = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (h == NULL) {
    return 0;
  }
  dlclose(h); /* RTLD_NOLOAD acquired a reference */
  return 1;
}

void sluice_dl_identify(void *h, char *file, size_t file_len, char *soname, size_t soname_len) {
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

int sluice_dl_symbol(void *h, const char *name, void *slot) {
  void *p = dlsym(h, name);
  memcpy(slot, &p, sizeof p); /* ISO C has no cast from an object pointer to a function pointer */
  return p != NULL;
}

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
struct load_job {
  sluice_dl_loader load;
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

int sluice_dl_load_in_thread(sluice_dl_loader load, const char *path, char *why, size_t why_len) {
  struct load_job job = {load, path, why, why_len, SLUICE_LOAD_THREAD};
  sigset_t all, old;
  pthread_t t;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int e = pthread_create(&t, NULL, load_main, &job);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (e != 0) {
    snprintf(why, why_len, "cannot start the loading thread: %s", strerror(e));
    return SLUICE_LOAD_THREAD;
  }
  pthread_join(t, NULL);
  return job.result;
}
