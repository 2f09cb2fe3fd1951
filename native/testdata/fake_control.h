/* How a library of ours is told what to answer: the same for both, each of which has
 * its own copy. Included once. */
#ifndef FAKE_CONTROL_H
#define FAKE_CONTROL_H

#include "fake_nixl_capi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_FORCED 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  char name[48];
  int status, times, calls;
} forced[MAX_FORCED];
static int pending; /* fake_pending's; what it means is the library's own */

static int find(const char *name) {
  int i = 0;
  for (; i < MAX_FORCED && forced[i].name[0] != '\0'; i++) {
    if (strcmp(forced[i].name, name) == 0) {
      return i;
    }
  }
  if (i < MAX_FORCED) {
    snprintf(forced[i].name, sizeof forced[i].name, "%s", name);
    return i;
  }
  abort();
}

/* times: how many calls are answered so; 0 for all. */
EXPORT void fake_set(const char *name, int status, int times) {
  pthread_mutex_lock(&lock);
  int i = find(name);
  forced[i].status = status;
  forced[i].times = times == 0 ? 1 << 30 : times;
  pthread_mutex_unlock(&lock);
}

EXPORT void fake_reset(void) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_FORCED; i++) {
    forced[i].times = 0;
  }
  pending = 0;
  pthread_mutex_unlock(&lock);
}

EXPORT int fake_calls(const char *name) {
  pthread_mutex_lock(&lock);
  int n = forced[find(name)].calls;
  pthread_mutex_unlock(&lock);
  return n;
}

EXPORT void fake_pending(int value) {
  pthread_mutex_lock(&lock);
  pending = value;
  pthread_mutex_unlock(&lock);
}

/* What a call is to answer: FAKE_NORMAL, FAKE_EMPTY, or a status. */
static int enter(const char *name) {
  for (int counted = 0;; counted = 1) {
    pthread_mutex_lock(&lock);
    int i = find(name);
    forced[i].calls += counted ? 0 : 1;
    int answer = forced[i].times > 0 ? forced[i].status : FAKE_NORMAL;
    if (answer != FAKE_NORMAL && answer != FAKE_HANG) {
      forced[i].times--;
    }
    pthread_mutex_unlock(&lock);
    if (answer != FAKE_HANG) {
      return answer;
    }
    usleep(200);
  }
}

#endif
