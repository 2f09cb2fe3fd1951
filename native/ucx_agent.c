/* A UCP worker behind the agent's commands and events, over the same rings, so that
 * nothing above it knows whether a message came through NIXL or as a bare active
 * message. UCX has a descriptor to wait on: idle, it sleeps. */
#define _GNU_SOURCE
#include "agent.h"
#include "ucx_api.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define AM_ID 7u
#define MAX_MESSAGE (64u << 10)        /* eager, in one piece */
#define MAX_SENDS 4096u                /* under way */
#define MAX_HELD 65536u                /* arrived, and the ring was full */
#define MAX_HELD_BYTES (16u << 20)
#define NAME_MAX_BYTES 255u

/* What LOAD takes and METADATA answers: this, the name, UCP's address. */
struct address_head {
  char magic[5]; /* "SLUCX" */
  uint8_t version, major, minor, name_len;
};

struct ucx;

struct ucx_peer {
  struct ucx *u;
  char *name;
  void *ep;
  int dead; /* told; its endpoint is closed by close_dead */
  uint32_t generation;
};

struct message { /* one that waits for room in the ring */
  struct message *next;
  size_t from_len, len;
  unsigned char bytes[];
};

struct send { /* one under way; it owns what UCX reads from */
  struct ucx *u;
  struct ucx_peer *peer;
  uint32_t generation;
  uint64_t token;
  unsigned char bytes[];
};

struct ucx {
  struct agent a; /* for the rings; its NIXL parts stay empty */
  const struct ucx_api *api;
  char name[NAME_MAX_BYTES + 1];
  void *context, *worker;
  int efd;
  struct ucx_peer peers[MAX_PEERS];
  uint32_t sends, answers; /* under way; of them those whose end is told */
  int any_dead;
  struct message *held, **held_end;
  size_t held_count, held_bytes;
};

static uint64_t clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int status_of(ucx_status s) { return s == UCX_OK ? 0 : s > 0 ? SLUICE_GARBAGE : SLUICE_UCX_ERROR + s; }

/* ---- arrivals ---- */

static void unread(struct ucx *u) { __atomic_store_n(&u->a.shared->unread, u->a.shared->unread + 1, __ATOMIC_RELAXED); }

static uint32_t places(const struct ucx *u) {
  return u->a.evt_mask + 1u - (uint32_t)(u->a.shared->evt_tail - __atomic_load_n(&u->a.shared->evt_head, __ATOMIC_ACQUIRE));
}

static int deliver(struct ucx *u, const void *from, size_t from_len, const void *data, size_t len) {
  if (places(u) <= u->answers + 2) {
    return 0; /* an arrival can wait; the end of a send comes when it comes */
  }
  struct sluice_slot *e = agent_next_event(&u->a);
  if (e == NULL) {
    return 0;
  }
  if (!event_payload(e, from, from_len, data, len)) {
    unread(u);
    return 1;
  }
  e->op = SLUICE_EV_NOTIF;
  e->aux = (uint32_t)from_len;
  agent_publish(&u->a);
  return 1;
}

static void release_held(struct ucx *u) {
  while (u->held != NULL) {
    struct message *m = u->held;
    if (!deliver(u, m->bytes, m->from_len, m->bytes + m->from_len, m->len)) {
      return;
    }
    u->held = m->next;
    u->held_count--;
    u->held_bytes -= m->from_len + m->len;
    free(m);
  }
  u->held_end = &u->held;
}

/* The worker makes no progress while anything is held, so what piles up here is
 * what one call of it delivers; the rest waits in the sockets, and the senders. */
static ucx_status arrived(void *arg, const void *header, size_t header_len, void *data, size_t len, const struct ucx_am_recv *param) {
  struct ucx *u = arg;
  if ((param->recv_attr & UCX_AM_RECV_RNDV) != 0 || header_len == 0 || header_len > NAME_MAX_BYTES || len > MAX_MESSAGE) {
    unread(u); /* nothing that our senders send */
    return UCX_OK;
  }
  if (u->held == NULL && deliver(u, header, header_len, data, len)) {
    return UCX_OK;
  }
  struct message *m = u->held_count < MAX_HELD && u->held_bytes < MAX_HELD_BYTES ? malloc(sizeof *m + header_len + len) : NULL;
  if (m == NULL) {
    unread(u);
    return UCX_OK;
  }
  m->next = NULL;
  m->from_len = header_len;
  m->len = len;
  memcpy(m->bytes, header, header_len);
  if (len > 0) {
    memcpy(m->bytes + header_len, data, len);
  }
  *u->held_end = m;
  u->held_end = &m->next;
  u->held_count++;
  u->held_bytes += header_len + len;
  return UCX_OK;
}

/* ---- peers ---- */

static struct ucx_peer *peer_at(struct ucx *u, uint64_t handle) {
  uint32_t i = (uint32_t)handle;
  return i < MAX_PEERS && u->peers[i].name != NULL && u->peers[i].generation == handle >> 32 ? &u->peers[i] : NULL;
}

static void peer_down(struct ucx *u, struct ucx_peer *p) {
  if (p->dead) {
    return;
  }
  p->dead = u->any_dead = 1;
  struct sluice_slot *e = agent_next_event(&u->a);
  if (e != NULL) { /* else the next send says it */
    e->op = SLUICE_EV_PEER_DOWN;
    e->handle = (uint64_t)p->generation << 32 | (uint64_t)(p - u->peers);
    agent_publish(&u->a);
  }
}

/* UCX calls it within progress, where an endpoint must not be closed. */
static void failed(void *arg, void *ep, ucx_status status) {
  struct ucx_peer *p = arg;
  (void)status;
  if (p->ep == ep) {
    peer_down(p->u, p);
  }
}

static void close_endpoint(struct ucx *u, struct ucx_peer *p) {
  if (p->ep == NULL) {
    return;
  }
  struct ucx_request_param how;
  memset(&how, 0, sizeof how);
  how.op_attr_mask = UCX_OP_FLAGS;
  how.flags = UCX_EP_CLOSE_FORCE;
  void *ep = p->ep;
  p->ep = NULL;
  void *request = u->api->ep_close_nbx(ep, &how);
  if (request != NULL && !ucx_is_error(request)) {
    u->api->request_free(request); /* it ends by itself */
  }
}

static void close_dead(struct ucx *u) {
  u->any_dead = 0;
  for (uint32_t i = 0; i < MAX_PEERS; i++) {
    if (u->peers[i].dead) {
      close_endpoint(u, &u->peers[i]);
    }
  }
}

static int connect_peer(struct ucx *u, struct ucx_peer *p, const void *address) {
  struct ucx_ep_params how;
  memset(&how, 0, sizeof how);
  how.field_mask = UCX_EP_REMOTE_ADDRESS | UCX_EP_ERR_MODE | UCX_EP_ERR_HANDLER;
  how.address = address;
  how.err_mode = UCX_ERR_MODE_PEER;
  how.err_handler.cb = failed;
  how.err_handler.arg = p;
  void *ep = NULL;
  int s = status_of(u->api->ep_create(u->worker, &how, &ep));
  if (s == 0 && ep == NULL) {
    return SLUICE_GARBAGE;
  }
  if (s == 0) {
    p->ep = ep;
    p->dead = 0;
  }
  return s;
}

/* UCX changed its addresses between 1.21 and 1.22; a message across brought the
 * older process down when it came through NIXL. */
static int fits(const struct ucx *u, unsigned major, unsigned minor) {
  return major == u->api->major && (minor >= 22) == (u->api->minor >= 22);
}

static int load_peer(struct ucx *u, const struct sluice_slot *c, uint64_t *handle, const char **name) {
  struct address_head h;
  const unsigned char *p = command_payload(c);
  if (c->len <= sizeof h) {
    return SLUICE_BAD_PAYLOAD;
  }
  memcpy(&h, p, sizeof h);
  if (memcmp(h.magic, "SLUCX", 5) != 0 || h.version != 1 || h.name_len == 0 || c->len <= sizeof h + h.name_len ||
      memchr(p + sizeof h, 0, h.name_len) != NULL) {
    return SLUICE_BAD_PAYLOAD;
  }
  if (!fits(u, h.major, h.minor)) {
    return SLUICE_VERSION;
  }
  struct ucx_peer *empty = NULL, *found = NULL;
  for (uint32_t i = 0; i < MAX_PEERS && found == NULL; i++) {
    struct ucx_peer *q = &u->peers[i];
    if (q->name == NULL) {
      empty = empty == NULL ? q : empty;
    } else if (strlen(q->name) == h.name_len && memcmp(q->name, p + sizeof h, h.name_len) == 0) {
      found = q;
    }
  }
  if (found == NULL) {
    if (empty == NULL) {
      return SLUICE_FULL;
    }
    empty->name = strndup((const char *)p + sizeof h, h.name_len);
    if (empty->name == NULL) {
      return SLUICE_FULL;
    }
    empty->generation++;
    empty->dead = 0;
    empty->u = u;
    found = empty;
  }
  close_endpoint(u, found); /* it may be another process of that name by now */
  /* Beside a copy: UCX reads the address as aligned words. */
  size_t n = c->len - sizeof h - h.name_len;
  void *address = malloc(n);
  int s = SLUICE_FULL;
  if (address != NULL) {
    memcpy(address, p + sizeof h + h.name_len, n);
    s = connect_peer(u, found, address);
    free(address);
  }
  if (s != 0) {
    found->dead = 1;
    if (found == empty) {
      free(found->name);
      found->name = NULL;
    }
    return s;
  }
  *handle = (uint64_t)found->generation << 32 | (uint64_t)(found - u->peers);
  *name = found->name;
  return 0;
}

static int drop_peer(struct ucx *u, uint64_t handle) {
  struct ucx_peer *p = peer_at(u, handle);
  if (p == NULL) {
    return SLUICE_BAD_HANDLE;
  }
  close_endpoint(u, p);
  free(p->name);
  p->name = NULL;
  p->dead = 0;
  return 0;
}

/* ---- sends ---- */

static void sent(void *request, ucx_status status, void *arg) {
  struct send *s = arg;
  struct ucx *u = s->u;
  if (status != UCX_OK && status != UCX_CANCELED && s->peer->generation == s->generation && s->peer->name != NULL) {
    peer_down(u, s->peer);
  }
  if (s->token != 0) {
    agent_answer(&u->a, s->token, status_of(status), 0, NULL, 0);
  }
  u->answers -= s->token != 0;
  u->sends--;
  free(s);
  if (request != NULL) {
    u->api->request_free(request);
  }
}

static void notify(struct ucx *u, const struct sluice_slot *c) {
  struct ucx_peer *p = peer_at(u, c->handle);
  int status = p == NULL ? SLUICE_BAD_HANDLE : p->dead || p->ep == NULL ? SLUICE_PEER_DEAD : c->len > MAX_MESSAGE ? SLUICE_BAD_PAYLOAD
               : u->sends >= MAX_SENDS || u->answers > u->a.evt_mask / 2                                           ? SLUICE_FULL
                                                                                                                 : 0;
  struct send *s = NULL;
  if (status == 0 && (s = malloc(sizeof *s + c->len + 1)) == NULL) {
    status = SLUICE_FULL;
  }
  if (status == 0) {
    *s = (struct send){u, p, p->generation, c->token};
    memcpy(s->bytes, command_payload(c), c->len);
    struct ucx_request_param how;
    memset(&how, 0, sizeof how);
    how.op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS;
    how.flags = UCX_AM_SEND_EAGER;
    how.send = sent;
    how.user_data = s;
    u->sends++;
    u->answers += c->token != 0;
    void *r = u->api->am_send_nbx(p->ep, AM_ID, u->name, strlen(u->name), s->bytes, c->len, &how);
    if (r != NULL && !ucx_is_error(r)) {
      return; /* sent answers */
    }
    u->sends--;
    u->answers -= c->token != 0;
    free(s);
    if (r != NULL) {
      status = status_of(ucx_error_of(r));
      peer_down(u, p);
    }
  }
  if (c->token != 0) {
    agent_answer(&u->a, c->token, status, 0, NULL, 0);
  }
}

/* ---- the worker ---- */

static int create(struct ucx *u, const struct sluice_slot *c) {
  const char *name = (const char *)command_payload(c);
  if (c->len < 2 || c->len > sizeof u->name || name[c->len - 1] != '\0') {
    return SLUICE_BAD_PAYLOAD;
  }
  memcpy(u->name, name, c->len);
  return 0;
}

static int configure(struct ucx *u, void *config, const char *p, const char *end) {
  for (p += strlen(p) + 1; p < end;) {
    const char *v = p + strlen(p) + 1;
    if (v >= end) {
      return SLUICE_BAD_PAYLOAD;
    }
    int s = status_of(u->api->config_modify(config, p, v));
    if (s != 0) {
      return s;
    }
    p = v + strlen(v) + 1;
  }
  return 0;
}

static int open_masked(struct ucx *u, const struct sluice_slot *c) {
  const struct ucx_api *f = u->api;
  const char *p = (const char *)command_payload(c);
  if (u->name[0] == '\0') {
    return SLUICE_NO_AGENT;
  }
  if (u->worker != NULL || u->context != NULL) {
    return SLUICE_NIXL_INVALID_STATE;
  }
  if (c->len < 2 || p[c->len - 1] != '\0') {
    return SLUICE_BAD_PAYLOAD;
  }
  void *config = NULL;
  int s = status_of(f->config_read(NULL, NULL, &config));
  if (s == 0 && config == NULL) {
    return SLUICE_GARBAGE;
  }
  if (s == 0 && (s = configure(u, config, p, p + c->len)) == 0) {
    struct ucx_params what;
    memset(&what, 0, sizeof what);
    what.field_mask = UCX_PARAM_FEATURES;
    what.features = UCX_FEATURE_AM | UCX_FEATURE_WAKEUP;
    s = status_of(f->init_version(UCX_API_MAJOR, UCX_API_MINOR, &what, config, &u->context));
  }
  if (config != NULL) {
    f->config_release(config);
  }
  if (s == 0 && u->context == NULL) {
    s = SLUICE_GARBAGE;
  }
  if (s == 0) {
    struct ucx_worker_params how;
    memset(&how, 0, sizeof how);
    how.field_mask = UCX_WORKER_THREAD_MODE;
    how.thread_mode = UCX_THREAD_SINGLE;
    s = status_of(f->worker_create(u->context, &how, &u->worker));
    s = s == 0 && u->worker == NULL ? SLUICE_GARBAGE : s;
  }
  __atomic_fetch_or(&u->a.shared->signals, sluice_signals_restore(), __ATOMIC_RELAXED);
  if (s == 0) {
    struct ucx_am_handler h;
    memset(&h, 0, sizeof h);
    h.field_mask = UCX_AM_HANDLER_ID | UCX_AM_HANDLER_CB | UCX_AM_HANDLER_ARG;
    h.id = AM_ID;
    h.cb = arrived;
    h.arg = u;
    s = status_of(f->worker_set_am_recv_handler(u->worker, &h));
  }
  if (s == 0) {
    s = status_of(f->worker_get_efd(u->worker, &u->efd));
    s = s == 0 && u->efd < 0 ? SLUICE_GARBAGE : s;
  }
  if (s != 0 && u->worker != NULL) {
    f->worker_destroy(u->worker);
  }
  if (s != 0 && u->context != NULL) {
    f->cleanup(u->context);
  }
  if (s != 0) {
    u->worker = u->context = NULL;
    u->efd = -1;
  }
  return s;
}

/* UCX's own thread inherits the mask: no signal of Go's lands in it. */
static int open_worker(struct ucx *u, const struct sluice_slot *c) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int s = open_masked(u, c);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  return s;
}

static void metadata(struct ucx *u, uint64_t token) {
  void *address = NULL;
  size_t n = 0;
  int s = status_of(u->api->worker_get_address(u->worker, &address, &n));
  if (s == 0 && (address == NULL || n == 0 || n > (1u << 20))) {
    s = SLUICE_GARBAGE;
  }
  struct address_head h = {{'S', 'L', 'U', 'C', 'X'}, 1, (uint8_t)u->api->major, (uint8_t)u->api->minor, (uint8_t)strlen(u->name)};
  size_t head = sizeof h + h.name_len;
  unsigned char *blob = s == 0 ? malloc(head + n) : NULL;
  if (s == 0 && blob == NULL) {
    s = SLUICE_FULL;
  }
  if (s == 0) {
    memcpy(blob, &h, sizeof h);
    memcpy(blob + sizeof h, u->name, h.name_len);
    memcpy(blob + head, address, n);
  }
  if (address != NULL) {
    u->api->worker_release_address(u->worker, address);
  }
  agent_leave(&u->a);
  agent_answer(&u->a, token, s, 0, blob, s == 0 ? head + n : 0);
  free(blob);
}

static void release_all(struct ucx *u) {
  for (uint32_t i = 0; i < MAX_PEERS; i++) {
    close_endpoint(u, &u->peers[i]);
  }
  if (u->worker != NULL) {
    /* The closes, and the ends of what was under way. */
    for (uint64_t end = clock_ns() + 200000000u; u->sends > 0 && clock_ns() < end;) {
      if (u->api->worker_progress(u->worker) == 0) {
        usleep(100);
      }
    }
    for (int i = 0; i < 100 && u->api->worker_progress(u->worker) > 0; i++) {
    }
    u->api->worker_destroy(u->worker); /* ends every send that is left */
  }
  if (u->context != NULL) {
    u->api->cleanup(u->context);
  }
  u->worker = u->context = NULL;
  u->efd = -1;
  for (uint32_t i = 0; i < MAX_PEERS; i++) {
    free(u->peers[i].name);
    u->peers[i].name = NULL;
  }
  while (u->held != NULL) {
    struct message *m = u->held;
    u->held = m->next;
    free(m);
  }
  u->held_end = &u->held;
}

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
  case SLUICE_OP_CREATE: status = create(u, c); break;
  case SLUICE_OP_BACKEND: status = open_worker(u, c); break;
  case SLUICE_OP_METADATA: metadata(u, c->token); return;
  case SLUICE_OP_LOAD: status = load_peer(u, c, &handle, &name); break;
  case SLUICE_OP_INVALIDATE: status = drop_peer(u, c->handle); break;
  case SLUICE_OP_CHECK:
  case SLUICE_OP_CONNECT: /* the first message connects */
    status = peer_at(u, c->handle) == NULL ? SLUICE_BAD_HANDLE : peer_at(u, c->handle)->dead ? SLUICE_PEER_DEAD : 0;
    break;
  case SLUICE_OP_NOTIFY:
    notify(u, c);
    agent_leave(a);
    return;
  case SLUICE_OP_STOP:
    release_all(u);
    a->stopping = 1;
    status = 0;
    break;
  default: status = c->op > SLUICE_OP_BACKEND && c->op < SLUICE_OP_STOP ? SLUICE_MISSING : SLUICE_BAD_PAYLOAD;
  }
  agent_leave(a);
  agent_answer(a, c->token, status, handle, name, name != NULL ? strlen(name) : 0);
}

/* ---- the loop ---- */

/* Room for an answer and a peer that went down, beside the ends of sends. */
static int room(const struct ucx *u) { return places(u) >= u->answers + 2; }

static int commands_run(struct ucx *u) {
  int n = 0;
  for (; n < 64 && !u->a.stopping && room(u); n++) {
    struct sluice_slot *c = agent_next_command(&u->a);
    if (c == NULL) {
      break;
    }
    u->a.now = clock_ns();
    execute(u, c);
    agent_command_done(&u->a, c);
  }
  return n;
}

/* A bounded number of looks; 0 when there is nothing left to do. */
static int progress(struct ucx *u) {
  int did = 0;
  release_held(u);
  agent_enter(&u->a, SLUICE_OP_LAST + 1);
  while (did < 64 && u->held == NULL && room(u) && u->api->worker_progress(u->worker) > 0) {
    did++;
  }
  if (u->any_dead) {
    close_dead(u);
    did++;
  }
  agent_leave(&u->a);
  return did;
}

static void nap(void) {
  struct timespec t = {0, 200000};
  nanosleep(&t, NULL);
}

/* Waits for a command or a message. */
static void rest(struct ucx *u) {
  struct agent *a = &u->a;
  if (u->held != NULL || !room(u)) { /* the reader is behind: nothing wakes us when it has read */
    nap();
    return;
  }
  __atomic_store_n(&a->shared->asleep, 1, __ATOMIC_SEQ_CST);
  uint64_t head = a->shared->cmd_head;
  int work = __atomic_load_n(&a->commands[head & a->cmd_mask].seq, __ATOMIC_SEQ_CST) == head + 1;
  ucx_status armed = UCX_OK;
  if (!work && u->worker != NULL) {
    armed = u->api->worker_arm(u->worker);
    work = armed == UCX_BUSY; /* something came meanwhile */
  }
  if (armed != UCX_OK && armed != UCX_BUSY) {
    if (a->notif_errors++ == 0) {
      agent_answer(a, 0, status_of(armed), SLUICE_OP_LAST + 1, NULL, 0);
    }
  } else if (a->notif_errors != 0) {
    a->notif_errors = 0;
    agent_answer(a, 0, 0, SLUICE_OP_LAST + 1, NULL, 0);
  }
  if (!work && a->pushed == 0) {
    struct pollfd p[2] = {{a->wake_fd, POLLIN, 0}, {u->efd, POLLIN, 0}};
    /* A worker that cannot be armed is polled for. */
    if (poll(p, u->worker != NULL ? 2 : 1, armed == UCX_OK ? 1000 : 1) > 0 && p[0].revents != 0) {
      uint64_t n;
      ssize_t ignored = read(a->wake_fd, &n, sizeof n);
      (void)ignored;
    }
  }
  __atomic_store_n(&a->shared->asleep, 0, __ATOMIC_SEQ_CST);
}

int sluice_ucx_step(void *worker) {
  struct ucx *u = worker;
  struct agent *a = &u->a;
  while (!a->stopping) {
    a->now = clock_ns();
    __atomic_store_n(&a->shared->beats, a->shared->beats + 1, __ATOMIC_RELAXED);
    int did = commands_run(u);
    if (u->worker != NULL && !a->stopping) {
      did += progress(u);
    }
    if (a->pushed > 0) {
      a->pushed = 0;
      return 1;
    }
    if (did == 0 && !a->stopping) {
      rest(u);
    }
  }
  struct sluice_shared *shared = a->shared;
  free(u);
  __atomic_store_n(&shared->gone, 1, __ATOMIC_SEQ_CST); /* the last touch of what the caller owns */
  return 0;
}

void *sluice_ucx_new(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, int wake_fd) {
  if (sluice_ucx_api() == NULL || shared == NULL || cmd_capacity < 2 || (cmd_capacity & (cmd_capacity - 1)) != 0 || evt_capacity < 4 ||
      (evt_capacity & (evt_capacity - 1)) != 0 || wake_fd < 0) {
    return NULL;
  }
  struct ucx *u = calloc(1, sizeof *u);
  if (u == NULL) {
    return NULL;
  }
  u->api = sluice_ucx_api();
  u->efd = -1;
  u->held_end = &u->held;
  agent_lay(&u->a, shared, cmd_capacity, evt_capacity, wake_fd, -1);
  return u;
}
