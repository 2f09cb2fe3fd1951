/* A UCP worker behind the agent's commands and events, over the same rings, so that
 * nothing above it knows whether a message came through NIXL or as a bare active
 * message. UCX has a descriptor to wait on: idle, it costs nothing. */
#define _GNU_SOURCE
#include "ucx_worker.h"

#include <stdlib.h>
#include <string.h>

static void execute(struct ucx *u, struct sluice_slot *c) {
  struct agent *a = &u->a;
  int status = SLUICE_BAD_PAYLOAD;
  uint64_t handle = 0;
  const char *name = NULL;
  if (c->op > SLUICE_OP_BACKEND && c->op < SLUICE_OP_STOP && u->worker == NULL) {
    agent_answer(a, c->token, SLUICE_NO_AGENT, 0, NULL, 0);
    return;
  }
  agent_enter(a, c->op);
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
    agent_leave(a);
    return;
  case SLUICE_OP_STOP:
    worker_release(u);
    a->stopping = 1;
    status = 0;
    break;
  default: status = c->op > SLUICE_OP_BACKEND && c->op < SLUICE_OP_STOP ? SLUICE_MISSING : SLUICE_BAD_PAYLOAD;
  }
  agent_leave(a);
  agent_answer(a, c->token, status, handle, name, name != NULL ? strlen(name) : 0);
}

/* Room for an answer and a peer that went down, beside the ends of sends. */
static int room(const struct ucx *u) { return message_places(u) >= u->answers + 2; }

static int commands_run(struct ucx *u) {
  int n = 0;
  u->full = 0;
  for (; n < 64 && !u->a.stopping && room(u); n++) {
    struct sluice_slot *c = agent_next_command(&u->a);
    if (c == NULL || (u->full = message_waits(u, c)) != 0) {
      break;
    }
    u->a.now = agent_clock();
    execute(u, c);
    agent_command_done(&u->a, c);
  }
  return n;
}

/* A bounded number of looks, up to the first that brings something for the reader: a
 * look that finds nothing costs system calls, and the message need not wait for it.
 * 0 when there is nothing left to do. */
static int progress(struct ucx *u) {
  int did = 0;
  messages_release(u);
  agent_enter(&u->a, SLUICE_OP_LAST + 1);
  while (did < 64 && u->a.pushed == 0 && u->held == NULL && room(u) && u->api->worker_progress(u->worker) > 0) {
    did++;
  }
  if (u->any_dead) {
    peers_close_dead(u);
    did++;
  }
  agent_leave(&u->a);
  return did;
}

/* Tells of a worker that cannot be armed, once, and of the end of that. */
static void trouble(struct ucx *u, ucx_status armed) {
  int bad = armed != UCX_OK && armed != UCX_BUSY;
  if (bad != (u->a.notif_errors != 0)) {
    agent_answer(&u->a, 0, bad ? ucx_status_of(armed) : 0, SLUICE_OP_LAST + 1, NULL, 0);
  }
  u->a.notif_errors = bad;
}

/* Whether the caller may wait for a command or a message, and how. */
static int rest(struct ucx *u) {
  struct agent *a = &u->a;
  if (u->held != NULL || !room(u) || u->full) { /* the reader is behind, or a peer: nothing wakes us when it has read, or has stood still */
    return SLUICE_UCX_NAP;
  }
  __atomic_store_n(&a->shared->asleep, 1, __ATOMIC_SEQ_CST);
  uint64_t head = a->shared->cmd_head;
  int work = __atomic_load_n(&a->commands[head & a->cmd_mask].seq, __ATOMIC_SEQ_CST) == head + 1;
  ucx_status armed = UCX_OK;
  if (!work && u->worker != NULL) {
    armed = u->api->worker_arm(u->worker);
    work = armed == UCX_BUSY; /* something came meanwhile */
    trouble(u, armed);
  }
  if (!work && a->pushed == 0) {
    return armed == UCX_OK ? SLUICE_UCX_WAIT : SLUICE_UCX_NAP; /* one that cannot be armed is polled for */
  }
  return SLUICE_UCX_MORE;
}

int sluice_ucx_fd(void *worker) { return ((struct ucx *)worker)->efd; }

int sluice_ucx_step(void *worker) {
  struct ucx *u = worker;
  struct agent *a = &u->a;
  __atomic_store_n(&a->shared->asleep, 0, __ATOMIC_SEQ_CST);
  a->now = agent_clock();
  __atomic_store_n(&a->shared->beats, a->shared->beats + 1, __ATOMIC_RELAXED);
  int did = commands_run(u);
  if (u->worker != NULL && !a->stopping) {
    did += progress(u);
  }
  int next = did > 0 || a->pushed > 0 ? SLUICE_UCX_MORE : a->stopping ? SLUICE_UCX_STOPPED : rest(u);
  if (next == SLUICE_UCX_STOPPED) {
    struct sluice_shared *shared = a->shared;
    free(u);
    __atomic_store_n(&shared->gone, 1, __ATOMIC_SEQ_CST); /* the last touch of what the caller owns */
    return next;
  }
  agent_wake_reader(a);
  return next;
}

void *sluice_ucx_new(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int event_fd) {
  if (sluice_ucx_api() == NULL || shared == NULL || !agent_capacities(cmd_capacity, evt_capacity)) {
    return NULL;
  }
  struct ucx *u = calloc(1, sizeof *u);
  if (u == NULL) {
    return NULL;
  }
  u->api = sluice_ucx_api();
  u->efd = -1;
  u->held_end = &u->held;
  agent_lay(&u->a, shared, cmd_capacity, evt_capacity, spill, -1, event_fd);
  return u;
}
