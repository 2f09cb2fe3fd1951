/* A UCP worker behind the rings, with the commands and events of a NIXL agent, so that
 * code above the rings does not depend on whether a message travelled through NIXL or as a
 * bare active message. UCX has a descriptor to wait on, so an idle worker costs nothing. */
#define _GNU_SOURCE
#include "ucx/worker.h"

#include <stdlib.h>
#include <string.h>

static void execute(struct ucx *u, struct sluice_slot *c) {
  struct rings *r = &u->rings;
  int status = SLUICE_BAD_PAYLOAD;
  uint64_t handle = 0;
  const char *name = NULL;
  if (c->op > SLUICE_OP_BACKEND && c->op < SLUICE_OP_STOP && u->worker == NULL) {
    rings_answer(r, c->token, SLUICE_NO_AGENT, 0, NULL, 0);
    return;
  }
  rings_enter_library(r, c->op);
  switch (c->op) {
  case SLUICE_OP_CREATE: status = worker_name(u, c); break;
  case SLUICE_OP_BACKEND: status = worker_open(u, c); break;
  case SLUICE_OP_METADATA: worker_metadata(u, c->token); return;
  case SLUICE_OP_LOAD: status = peer_load(u, c, &handle, &name); break;
  case SLUICE_OP_INVALIDATE: status = peer_drop(u, c->handle); break;
  case SLUICE_OP_CHECK:
  case SLUICE_OP_CONNECT: /* the first message connects */
    status = peer_at(u, c->handle) == NULL ? SLUICE_BAD_HANDLE : peer_at(u, c->handle)->dead ? SLUICE_PEER_DEAD : 0;
    break;
  case SLUICE_OP_NOTIFY:
    message_send(u, c);
    rings_leave_library(r);
    return;
  case SLUICE_OP_STOP:
    worker_release(u);
    r->stopping = 1;
    status = 0;
    break;
  default: status = c->op > SLUICE_OP_BACKEND && c->op < SLUICE_OP_STOP ? SLUICE_MISSING : SLUICE_BAD_PAYLOAD;
  }
  rings_leave_library(r);
  rings_answer(r, c->token, status, handle, name, name != NULL ? strlen(name) : 0);
}

/* Space for an answer and a peer that went down, besides the ends of sends. */
static int room(const struct ucx *u) { return rings_free_events(&u->rings) >= u->answers + 2; }

static int commands_run(struct ucx *u) {
  int n = 0;
  u->full = 0;
  for (; n < 64 && !u->rings.stopping && room(u); n++) {
    struct sluice_slot *c = rings_next_command(&u->rings);
    if (c == NULL || (u->full = message_waits(u, c)) != 0) {
      break;
    }
    u->rings.now = rings_clock();
    execute(u, c);
    rings_command_done(&u->rings, c);
  }
  return n;
}

/* Polls a bounded number of times, until one poll yields an event for the reader: a poll
 * without a result costs system calls, for which the message need not wait. Returns 0 if
 * nothing is left to do. */
static int progress(struct ucx *u) {
  int did = 0;
  messages_release(u);
  rings_enter_library(&u->rings, SLUICE_OP_LAST + 1);
  while (did < 64 && u->rings.pushed == 0 && u->held == NULL && room(u) && u->api->worker_progress(u->worker) > 0) {
    did++;
  }
  if (u->any_dead) {
    peers_close_dead(u);
    did++;
  }
  rings_leave_library(&u->rings);
  return did;
}

/* Reports once that the worker cannot be armed, and once that it can be again. */
static void trouble(struct ucx *u, ucx_status armed) {
  int bad = armed != UCX_OK && armed != UCX_BUSY;
  if (bad != (u->arm_failing != 0)) {
    rings_answer(&u->rings, 0, bad ? ucx_status_of(armed) : 0, SLUICE_OP_LAST + 1, NULL, 0);
  }
  u->arm_failing = bad;
}

/* Whether the caller may wait for a command or a message, and how. */
static int rest(struct ucx *u) {
  struct rings *r = &u->rings;
  if (u->held != NULL || !room(u) || u->full) { /* the reader or a peer is behind, and nothing wakes the caller when that ends */
    return SLUICE_UCX_NAP;
  }
  __atomic_store_n(&r->shared->asleep, 1, __ATOMIC_SEQ_CST);
  int work = rings_command_waits(r);
  ucx_status armed = UCX_OK;
  if (!work && u->worker != NULL) {
    armed = u->api->worker_arm(u->worker);
    work = armed == UCX_BUSY; /* something has arrived */
    trouble(u, armed);
  }
  if (!work && r->pushed == 0) {
    return armed == UCX_OK ? SLUICE_UCX_WAIT : SLUICE_UCX_NAP; /* a worker that cannot be armed is polled */
  }
  return SLUICE_UCX_MORE;
}

int sluice_ucx_fd(void *worker) { return ((struct ucx *)worker)->efd; }

int sluice_ucx_step(void *worker) {
  struct ucx *u = worker;
  struct rings *r = &u->rings;
  __atomic_store_n(&r->shared->asleep, 0, __ATOMIC_SEQ_CST);
  r->now = rings_clock();
  __atomic_store_n(&r->shared->beats, r->shared->beats + 1, __ATOMIC_RELAXED);
  int did = commands_run(u);
  if (u->worker != NULL && !r->stopping) {
    did += progress(u);
  }
  int next = did > 0 || r->pushed > 0 ? SLUICE_UCX_MORE : r->stopping ? SLUICE_UCX_STOPPED : rest(u);
  if (next == SLUICE_UCX_STOPPED) {
    struct sluice_shared *shared = r->shared;
    free(u);
    __atomic_store_n(&shared->gone, 1, __ATOMIC_SEQ_CST); /* the last access to memory that the caller owns */
    return next;
  }
  rings_wake_reader(r);
  return next;
}

void *sluice_ucx_new(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int event_fd) {
  if (sluice_ucx_api() == NULL || shared == NULL || !rings_capacities_valid(cmd_capacity, evt_capacity)) {
    return NULL;
  }
  struct ucx *u = calloc(1, sizeof *u);
  if (u == NULL) {
    return NULL;
  }
  u->api = sluice_ucx_api();
  u->efd = -1;
  u->held_end = &u->held;
  rings_init(&u->rings, shared, cmd_capacity, evt_capacity, spill, event_fd);
  return u;
}
