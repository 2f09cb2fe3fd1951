/* Go's runtime needs its own signal handlers: a foreign one without SA_ONSTACK runs on a
 * goroutine's stack and crashes the process. UCX is configured to install none; handlers
 * that a library installs nevertheless are replaced here by the previous ones. */
#define _GNU_SOURCE
#include "dl/dl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before[64];
static int remembered;

/* The base address of the object that contains a handler; NULL for default and ignored. */
static const void *home(const struct sigaction *a) {
  Dl_info info;
  void *p;
  memcpy(&p, &a->sa_sigaction, sizeof p);
  if (a->sa_handler == SIG_DFL || a->sa_handler == SIG_IGN || a->sa_handler == SIG_ERR) {
    return NULL;
  }
  return dladdr(p, &info) != 0 ? info.dli_fbase : p;
}

/* The object that contains this code; with cgo it also contains the Go runtime. */
static const void *ours(void) {
  Dl_info info;
  void *p = (void *)&remembered;
  return dladdr(p, &info) != 0 ? info.dli_fbase : NULL;
}

void sluice_signals_remember(void) {
  pthread_mutex_lock(&lock);
  if (!remembered) {
    for (int s = 1; s < 64; s++) {
      if (sigaction(s, NULL, &before[s]) != 0) {
        memset(&before[s], 0, sizeof before[s]);
      }
    }
    remembered = 1;
  }
  pthread_mutex_unlock(&lock);
}

uint64_t sluice_signals_restore(void) {
  uint64_t taken = 0;
  pthread_mutex_lock(&lock);
  const void *us = ours();
  for (int s = 1; remembered && s < 64; s++) {
    struct sigaction now;
    if (s == SIGKILL || s == SIGSTOP || sigaction(s, NULL, &now) != 0) {
      continue;
    }
    const void *h = home(&now);
    /* Handlers that the program itself changed (as signal.Notify does) stay. */
    if (h == NULL || h == us || h == home(&before[s])) {
      before[s] = now;
      continue;
    }
    if (sigaction(s, &before[s], NULL) == 0) {
      taken |= (uint64_t)1 << s;
    }
  }
  pthread_mutex_unlock(&lock);
  return taken;
}
