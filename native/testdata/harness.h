/* Drives an agent's thread over its rings, as Go does. */
#ifndef HARNESS_H
#define HARNESS_H

#define _GNU_SOURCE
#include "fake_nixl_capi.h"
#include "dl/dl.h"
#include "nixl/nixl.h"
#include "ucx/ucx.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static int checks, failures;

#define CHECK(ok, ...)                          \
  do {                                          \
    checks++;                                   \
    if (!(ok)) {                                \
      failures++;                               \
      fprintf(stderr, "FAIL %s:%d: ", __FILE__, __LINE__); \
      fprintf(stderr, __VA_ARGS__);             \
      fputc('\n', stderr);                      \
    }                                           \
  } while (0)

static inline int done(void) {
  printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}

struct rig {
  struct sluice_shared *shared;
  struct sluice_slot *commands, *events;
  uint32_t ncommands, nevents, spill;
  int wake, event;
};

static inline double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline struct rig rig_spilling(uint32_t commands, uint32_t events, uint32_t spill) {
  struct rig r;
  size_t n = sizeof(struct sluice_shared) + (size_t)(commands + events) * (sizeof(struct sluice_slot) + spill);
  r.shared = calloc(1, n);
  if (r.shared == NULL) {
    abort();
  }
  r.commands = (struct sluice_slot *)(r.shared + 1);
  r.events = r.commands + commands;
  r.ncommands = commands;
  r.nevents = events;
  r.spill = spill;
  r.wake = eventfd(0, EFD_NONBLOCK);
  r.event = eventfd(0, EFD_NONBLOCK);
  return r;
}

static inline struct rig rig_new(uint32_t commands, uint32_t events) { return rig_spilling(commands, events, 0); }

static inline unsigned char *rig_spill(const struct rig *r, size_t slot) {
  return (unsigned char *)(r->events + r->nevents) + slot * r->spill;
}

static inline int rig_start(struct rig *r) {
  struct sluice_poll_intervals poll = {20000, 20000, 5000000};
  return sluice_agent_start(r->shared, r->ncommands, r->nevents, r->spill, r->wake, r->event, &poll);
}

static inline int push(struct rig *r, uint32_t op, uint64_t token, uint64_t handle, const uint64_t *args, const void *p, size_t n) {
  for (;;) {
    uint64_t at = __atomic_load_n(&r->shared->cmd_tail, __ATOMIC_ACQUIRE);
    struct sluice_slot *c = &r->commands[at & (r->ncommands - 1)];
    int64_t d = (int64_t)(__atomic_load_n(&c->seq, __ATOMIC_ACQUIRE) - at);
    if (d < 0) {
      return 0;
    }
    if (d > 0 || !__atomic_compare_exchange_n(&r->shared->cmd_tail, &at, at + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
      continue;
    }
    c->op = op;
    c->token = token;
    c->handle = handle;
    c->big = 0;
    c->len = (uint32_t)n;
    for (int i = 0; i < 3; i++) {
      c->arg[i] = args != NULL ? args[i] : 0;
    }
    unsigned char *to = c->data;
    if (n > SLUICE_INLINE) {
      to = r->spill > 0 ? rig_spill(r, at & (r->ncommands - 1)) : sluice_alloc(n);
      c->big = (uint64_t)(uintptr_t)to;
    }
    if (n > 0) {
      memcpy(to, p, n);
    }
    __atomic_store_n(&c->seq, at + 1, __ATOMIC_SEQ_CST);
    if (__atomic_exchange_n(&r->shared->asleep, 0, __ATOMIC_SEQ_CST) != 0) {
      uint64_t one = 1;
      if (write(r->wake, &one, sizeof one) < 0) {
        abort();
      }
    }
    return 1;
  }
}

/* Takes the next event within a time; 0 when none came. The payload is copied to
 * buf, ended by a NUL. */
static inline int pull(struct rig *r, struct sluice_slot *e, char *buf, size_t size, double wait) {
  double end = now_s() + wait;
  uint64_t at = r->shared->evt_head;
  while (__atomic_load_n(&r->shared->evt_tail, __ATOMIC_ACQUIRE) == at) {
    if (now_s() > end) {
      return 0;
    }
    usleep(20);
  }
  struct sluice_slot *s = &r->events[at & (r->nevents - 1)];
  *e = *s;
  if (buf != NULL) {
    size_t n = s->len < size - 1 ? s->len : size - 1;
    memcpy(buf, s->big != 0 ? (void *)(uintptr_t)s->big : s->data, n);
    buf[n] = '\0';
  }
  if (s->big != 0 && r->spill == 0) {
    sluice_free((void *)(uintptr_t)s->big);
  }
  s->big = 0;
  __atomic_store_n(&r->shared->evt_head, at + 1, __ATOMIC_RELEASE);
  return 1;
}

/* One command and its answer; other events are dropped. */
static inline int call(struct rig *r, uint32_t op, uint64_t handle, const uint64_t *args, const void *p, size_t n, struct sluice_slot *e,
                       char *buf, size_t size) {
  static uint64_t token = 1000;
  uint64_t mine = ++token;
  if (!push(r, op, mine, handle, args, p, n)) {
    return -9999;
  }
  while (pull(r, e, buf, size, 10)) {
    if (e->op == SLUICE_EV_DONE && e->token == mine) {
      return e->status;
    }
  }
  return -9998;
}

static inline void rig_stop(struct rig *r) {
  struct sluice_slot e;
  char buf[256];
  CHECK(call(r, SLUICE_OP_STOP, 0, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "stop");
  for (double end = now_s() + 10; __atomic_load_n(&r->shared->gone, __ATOMIC_ACQUIRE) == 0 && now_s() < end;) {
    usleep(100);
  }
  CHECK(r->shared->gone == 1, "the thread has ended");
  close(r->wake);
  close(r->event);
  free(r->shared);
}

/* The fake's controls. */
static struct {
  void (*set)(const char *, int, int);
  void (*reset)(void);
  int (*calls)(const char *);
  void (*pending)(int);
} fake;

/* Finds the controls of the fake at path, which is loaded. */
static inline void *control_fake(const char *path) {
  void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD), *p;
  if (h == NULL) {
    exit(2);
  }
  p = dlsym(h, "fake_set"), memcpy(&fake.set, &p, sizeof p);
  p = dlsym(h, "fake_reset"), memcpy(&fake.reset, &p, sizeof p);
  p = dlsym(h, "fake_calls"), memcpy(&fake.calls, &p, sizeof p);
  p = dlsym(h, "fake_pending"), memcpy(&fake.pending, &p, sizeof p);
  return h;
}

static inline void load_fake(const char *dir) {
  char path[1024], why[1024];
  snprintf(path, sizeof path, "%s/good/libnixl_capi.so", dir);
  int code = sluice_nixl_load(path, why, sizeof why);
  CHECK(code == SLUICE_LOAD_OK, "loading %s: %d %s", path, code, why);
  control_fake(path);
}

static inline int begin(struct rig *r, const char *name) {
  struct sluice_slot e;
  char buf[1024];
  uint64_t args[3] = {SLUICE_CREATE_PROGRESS | SLUICE_CREATE_TELEMETRY, 1000, 0};
  int s = call(r, SLUICE_OP_CREATE, 0, args, name, strlen(name) + 1, &e, buf, sizeof buf);
  return s != 0 ? s : call(r, SLUICE_OP_BACKEND, 0, NULL, "UCX\0num_workers\0001", 18, &e, buf, sizeof buf);
}

#endif
