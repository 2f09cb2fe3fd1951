/* The two rings. Their memory order is argued at struct sluice_shared. */
#define _GNU_SOURCE
#include "agent.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The shared block holds plain integers, so that Go and C++ can name the same
 * struct; every access of both sides goes through these. */
#define LOAD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

int agent_room(const struct agent *a) {
  uint64_t tail = a->shared->evt_tail; /* ours */
  return tail - LOAD(&a->shared->evt_head) <= a->evt_mask;
}

struct sluice_slot *agent_next_event(struct agent *a) {
  if (!agent_room(a)) {
    return NULL;
  }
  struct sluice_slot *e = &a->events[a->shared->evt_tail & a->evt_mask];
  memset(e, 0, offsetof(struct sluice_slot, data));
  return e;
}

void agent_publish(struct agent *a) {
  __atomic_store_n(&a->shared->evt_tail, a->shared->evt_tail + 1, __ATOMIC_SEQ_CST);
  a->pushed++;
}

void agent_wake_reader(struct agent *a) {
  if (a->pushed == 0) {
    return;
  }
  a->pushed = 0;
  if (__atomic_load_n(&a->shared->waiting, __ATOMIC_SEQ_CST) != 0 &&
      __atomic_exchange_n(&a->shared->waiting, 0, __ATOMIC_SEQ_CST) != 0) {
    uint64_t one = 1;
    ssize_t ignored = write(a->event_fd, &one, sizeof one);
    (void)ignored; /* full means that it is readable already */
  }
}

/* A slot's place for what does not fit in it, where the block has such places. */
static unsigned char *spill_of(const struct agent *a, size_t slot) { return (unsigned char *)(a->events + a->evt_mask + 1) + slot * a->spill; }

int event_payload(struct agent *a, struct sluice_slot *e, const void *p, size_t n, const void *q, size_t m) {
  size_t most = a->spill > 0 ? a->spill : SLUICE_BIG_MAX;
  if (n > most || m > most || n + m > most) {
    return 0;
  }
  unsigned char *to = e->data;
  e->big = 0;
  if (n + m > SLUICE_INLINE) {
    to = a->spill > 0 ? spill_of(a, (size_t)(e - a->commands)) : malloc(n + m);
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

struct sluice_slot *agent_next_command(struct agent *a) {
  uint64_t head = a->shared->cmd_head; /* ours */
  struct sluice_slot *c = &a->commands[head & a->cmd_mask];
  return LOAD(&c->seq) == head + 1 ? c : NULL;
}

void agent_command_done(struct agent *a, struct sluice_slot *c) {
  uint64_t head = a->shared->cmd_head;
  if (c->big != 0 && a->spill == 0) {
    free((void *)(uintptr_t)c->big);
  }
  c->big = 0;
  STORE(&a->shared->cmd_head, head + 1);
  STORE(&c->seq, head + 1 + a->cmd_mask);
}

const unsigned char *command_payload(const struct agent *a, const struct sluice_slot *c) {
  return c->big == 0 ? c->data : a->spill > 0 ? spill_of(a, (size_t)(c - a->commands)) : (const unsigned char *)(uintptr_t)c->big;
}
