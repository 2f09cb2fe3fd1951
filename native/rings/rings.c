/* The driver's side of the two rings. struct sluice_shared explains the memory order. */
#define _GNU_SOURCE
#include "rings/driver.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The shared block has plain integers, so that Go can mirror the struct; both sides
 * access them through atomic operations only. */
#define LOAD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

int rings_capacities_valid(uint32_t commands, uint32_t events) {
  return commands >= 2 && (commands & (commands - 1)) == 0 && events >= 4 && (events & (events - 1)) == 0;
}

void rings_init(struct rings *r, struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int event_fd) {
  r->shared = shared;
  r->commands = (struct sluice_slot *)(shared + 1);
  r->events = r->commands + cmd_capacity;
  r->cmd_mask = cmd_capacity - 1;
  r->evt_mask = evt_capacity - 1;
  r->spill = spill;
  r->event_fd = event_fd;
  for (uint32_t i = 0; i < cmd_capacity; i++) {
    r->commands[i].seq = i;
  }
}

uint64_t rings_clock(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint32_t rings_free_events(const struct rings *r) {
  return r->evt_mask + 1u - (uint32_t)(r->shared->evt_tail - LOAD(&r->shared->evt_head));
}

struct sluice_slot *rings_next_event(struct rings *r) {
  if (rings_free_events(r) == 0) {
    return NULL;
  }
  struct sluice_slot *e = &r->events[r->shared->evt_tail & r->evt_mask];
  memset(e, 0, offsetof(struct sluice_slot, data));
  return e;
}

void rings_publish(struct rings *r) {
  __atomic_store_n(&r->shared->evt_tail, r->shared->evt_tail + 1, __ATOMIC_SEQ_CST);
  r->pushed++;
}

void rings_wake_reader(struct rings *r) {
  if (r->pushed == 0) {
    return;
  }
  r->pushed = 0;
  if (__atomic_load_n(&r->shared->waiting, __ATOMIC_SEQ_CST) != 0 &&
      __atomic_exchange_n(&r->shared->waiting, 0, __ATOMIC_SEQ_CST) != 0) {
    uint64_t one = 1;
    ssize_t ignored = write(r->event_fd, &one, sizeof one);
    (void)ignored; /* a full eventfd is readable already */
  }
}

/* The spill bytes of a slot. */
static unsigned char *spill_of(const struct rings *r, size_t slot) { return (unsigned char *)(r->events + r->evt_mask + 1) + slot * r->spill; }

int rings_event_payload(struct rings *r, struct sluice_slot *e, const void *p, size_t n, const void *q, size_t m) {
  size_t limit = r->spill > 0 ? r->spill : SLUICE_BIG_MAX;
  if (n > limit || m > limit || n + m > limit) {
    return 0;
  }
  unsigned char *to = e->data;
  e->big = 0;
  if (n + m > SLUICE_INLINE) {
    to = r->spill > 0 ? spill_of(r, (size_t)(e - r->commands)) : malloc(n + m);
    if (to == NULL) {
      return 0;
    }
    e->big = (uint64_t)(uintptr_t)to;
  }
  if (n > 0) {
    memcpy(to, p, n);
  }
  if (m > 0) {
    memcpy(to + n, q, m);
  }
  e->len = (uint32_t)(n + m);
  return 1;
}

void rings_answer(struct rings *r, uint64_t token, int status, uint64_t handle, const void *p, size_t n) {
  struct sluice_slot *e = rings_next_event(r);
  if (e == NULL) {
    return; /* only an unsolicited answer can meet a full ring */
  }
  e->op = SLUICE_EV_DONE;
  e->token = token;
  e->status = status;
  e->handle = handle;
  if (!rings_event_payload(r, e, p, n, NULL, 0)) {
    e->status = SLUICE_FULL;
  }
  rings_publish(r);
}

struct sluice_slot *rings_next_command(struct rings *r) {
  uint64_t head = r->shared->cmd_head;
  struct sluice_slot *c = &r->commands[head & r->cmd_mask];
  return LOAD(&c->seq) == head + 1 ? c : NULL;
}

int rings_command_waits(const struct rings *r) {
  uint64_t head = r->shared->cmd_head;
  return __atomic_load_n(&r->commands[head & r->cmd_mask].seq, __ATOMIC_SEQ_CST) == head + 1;
}

void rings_command_done(struct rings *r, struct sluice_slot *c) {
  uint64_t head = r->shared->cmd_head;
  if (c->big != 0 && r->spill == 0) {
    free((void *)(uintptr_t)c->big);
  }
  c->big = 0;
  STORE(&r->shared->cmd_head, head + 1);
  STORE(&c->seq, head + 1 + r->cmd_mask);
}

const unsigned char *rings_command_payload(const struct rings *r, const struct sluice_slot *c) {
  return c->big == 0 ? c->data : r->spill > 0 ? spill_of(r, (size_t)(c - r->commands)) : (const unsigned char *)(uintptr_t)c->big;
}

/* Polling uses the time of the iteration, which is at most a few microseconds old. */
void rings_enter_library(struct rings *r, uint64_t op) {
  __atomic_store_n(&r->shared->busy_op, op, __ATOMIC_RELAXED);
  __atomic_store_n(&r->shared->busy_since, r->now, __ATOMIC_RELEASE);
}

void rings_leave_library(struct rings *r) { __atomic_store_n(&r->shared->busy_since, 0, __ATOMIC_RELEASE); }

void *sluice_alloc(size_t n) { return malloc(n); }
void sluice_free(void *p) { free(p); }
