/* Transfers are created, posted, polled and released by the thread. Each ends with one
 * answer to its token. */
#define _GNU_SOURCE
#include "nixl/agent.h"

#include <string.h>

/* A request that the library does not release is retried this often, then leaked: the
 * library still uses it, so freeing it would be worse. */
#define RELEASE_TRIES 100000u

static int release(struct agent *a, struct transfer *t) {
  if (t->request != NULL) {
    if (a->api->release_xfer_req(a->nixl, t->request) != 0) {
      if (++t->tries < RELEASE_TRIES) {
        return 0;
      }
      __atomic_fetch_add(&a->rings.shared->stuck, 1, __ATOMIC_RELAXED);
    } else {
      a->api->destroy_xfer_req(t->request);
    }
  }
  *t = a->transfers[--a->live];
  return 1;
}

static void answer(struct agent *a, struct transfer *t, int status) {
  struct sluice_slot *e = rings_next_event(&a->rings);
  if (e == NULL) {
    return; /* callers have checked for space */
  }
  e->op = SLUICE_EV_DONE;
  e->token = t->token;
  e->status = status;
  struct nixl_telemetry m;
  memset(&m, 0, sizeof m);
  if (status == 0 && a->telemetry && a->api->get_xfer_telemetry != NULL && a->api->get_xfer_telemetry(a->nixl, t->request, &m) == 0) {
    e->arg[0] = m.post_duration_us;
    e->arg[1] = m.xfer_duration_us;
    e->arg[2] = m.total_bytes;
    e->aux = 1;
  }
  rings_publish(&a->rings);
  t->ending = 1;
}

static void *descriptors(struct agent *a, int type, const unsigned char **p, uint32_t n, int *status) {
  void *list = NULL;
  *status = agent_status(a->api->create_xfer_dlist(type, &list));
  if (*status != 0 || list == NULL) {
    *status = *status != 0 ? *status : SLUICE_GARBAGE;
    return NULL;
  }
  for (uint32_t i = 0; i < n && *status == 0; i++) {
    struct sluice_desc d;
    memcpy(&d, *p, sizeof d);
    *p += sizeof d;
    *status = agent_status(a->api->xfer_dlist_add_desc(list, (uintptr_t)d.addr, (size_t)d.len, d.dev));
  }
  return list;
}

/* Builds the request. NIXL requires that the message is set before has_notif. */
static int prepare(struct agent *a, const struct sluice_slot *c, const struct peer *peer, void **request) {
  const struct nixl_api *f = a->api;
  struct sluice_transfer h;
  const unsigned char *p = rings_command_payload(&a->rings, c);
  if (c->len < sizeof h) {
    return SLUICE_BAD_PAYLOAD;
  }
  memcpy(&h, p, sizeof h);
  p += sizeof h;
  if (h.locals == 0 || h.locals != h.remotes || h.locals > MAX_DESCS ||
      c->len != sizeof h + ((uint64_t)h.locals + h.remotes) * sizeof(struct sluice_desc) + h.notif_len) {
    return SLUICE_BAD_PAYLOAD;
  }
  int s = 0;
  void *local = descriptors(a, h.local_type, &p, h.locals, &s), *remote = NULL, *options = NULL;
  if (s == 0) {
    remote = descriptors(a, h.remote_type, &p, h.remotes, &s);
  }
  if (s == 0) {
    s = agent_status(f->create_opt_args(&options));
    s = s == 0 && options == NULL ? SLUICE_GARBAGE : s;
  }
  if (s == 0) {
    s = agent_status(f->opt_args_add_backend(options, a->backend));
  }
  if (s == 0 && h.has_notif) {
    s = agent_status(f->opt_args_set_notif_msg(options, p, h.notif_len));
    s = s == 0 ? agent_status(f->opt_args_set_has_notif(options, true)) : s;
  }
  if (s == 0) {
    s = agent_status(f->create_xfer_req(a->nixl, h.write ? 1 : 0, local, remote, peer->name, request, options));
    s = s == 0 && *request == NULL ? SLUICE_GARBAGE : s;
  }
  if (options != NULL) {
    f->destroy_opt_args(options);
  }
  if (remote != NULL) {
    f->destroy_xfer_dlist(remote);
  }
  if (local != NULL) {
    f->destroy_xfer_dlist(local);
  }
  return s;
}

void transfer_start(struct agent *a, struct sluice_slot *c) {
  struct peer *peer = agent_peer(a, c->handle);
  if (peer == NULL || peer->dead || a->live == MAX_TRANSFERS) {
    rings_answer(&a->rings, c->token, peer == NULL ? SLUICE_BAD_HANDLE : peer->dead ? SLUICE_PEER_DEAD : SLUICE_FULL, 0, NULL, 0);
    return;
  }
  void *request = NULL;
  int s = prepare(a, c, peer, &request);
  if (s != 0) {
    rings_answer(&a->rings, c->token, s, 0, NULL, 0);
    return;
  }
  struct transfer *t = &a->transfers[a->live++];
  memset(t, 0, sizeof *t);
  t->token = c->token;
  t->request = request;
  t->peer = (uint32_t)c->handle;
  s = agent_status(a->api->post_xfer_req(a->nixl, request, NULL));
  if (s == SLUICE_NIXL_IN_PROG) {
    return;
  }
  if (s == SLUICE_NIXL_BACKEND) {
    agent_peer_down(a, t->peer);
  }
  answer(a, t, s);
  release(a, t);
}

void transfer_cancel(struct agent *a, struct sluice_slot *c) {
  for (uint32_t i = 0; i < a->live; i++) {
    struct transfer *t = &a->transfers[i];
    if (t->token == c->handle && !t->ending) {
      answer(a, t, SLUICE_CANCELED);
      release(a, t);
      return;
    }
  }
}

int transfers_poll(struct agent *a) {
  int did = 0;
  for (uint32_t i = 0; i < a->live;) {
    struct transfer *t = &a->transfers[i];
    if (t->ending) {
      i += release(a, t) ? 0 : 1;
      continue;
    }
    if (rings_free_events(&a->rings) < 2) {
      return did;
    }
    rings_enter_library(&a->rings, SLUICE_OP_TRANSFER);
    int s = agent_status(a->api->get_xfer_status(a->nixl, t->request));
    rings_leave_library(&a->rings);
    if (s == SLUICE_NIXL_IN_PROG) {
      i++;
      continue;
    }
    if (s == SLUICE_NIXL_BACKEND) {
      agent_peer_down(a, t->peer);
    }
    answer(a, t, s);
    did++;
    i += release(a, t) ? 0 : 1;
  }
  return did;
}

void transfers_abandon(struct agent *a) {
  while (a->live > 0) {
    struct transfer *t = &a->transfers[0];
    if (!t->ending) {
      answer(a, t, SLUICE_CANCELED);
    }
    t->tries = RELEASE_TRIES;
    release(a, t);
  }
}
