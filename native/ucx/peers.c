/* Peers of a UCP worker. Each has an endpoint; its failure is reported once, after which
 * the peer must be loaded again. */
#define _GNU_SOURCE
#include "ucx/worker.h"

#include <stdlib.h>
#include <string.h>

struct ucx_peer *peer_at(struct ucx *u, uint64_t handle) {
  uint32_t i = (uint32_t)handle;
  return i < MAX_PEERS && u->peers[i].name != NULL && u->peers[i].generation == handle >> 32 ? &u->peers[i] : NULL;
}

void peer_down(struct ucx *u, struct ucx_peer *p) {
  if (p->dead) {
    return;
  }
  p->dead = u->any_dead = 1;
  struct sluice_slot *e = rings_next_event(&u->rings);
  if (e != NULL) { /* otherwise the next send reports it */
    e->op = SLUICE_EV_PEER_DOWN;
    e->handle = (uint64_t)p->generation << 32 | (uint64_t)(p - u->peers);
    rings_publish(&u->rings);
  }
}

/* UCX calls this within progress, where an endpoint must not be closed. */
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

void peers_close_dead(struct ucx *u) {
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
  int s = ucx_status_of(u->api->ep_create(u->worker, &how, &ep));
  if (s == 0 && ep == NULL) {
    return SLUICE_GARBAGE;
  }
  if (s == 0) {
    p->ep = ep;
    p->dead = 0;
  }
  return s;
}

/* UCX changed its address format between 1.21 and 1.22; a message from the newer to the
 * older one crashed the older process when it travelled through NIXL. */
static int fits(const struct ucx *u, unsigned major, unsigned minor) {
  return major == u->api->major && (minor >= 22) == (u->api->minor >= 22);
}

int peer_load(struct ucx *u, const struct sluice_slot *c, uint64_t *handle, const char **name) {
  struct address_head h;
  const unsigned char *p = rings_command_payload(&u->rings, c);
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
    empty->sends = 0;
    empty->u = u;
    found = empty;
  }
  close_endpoint(u, found); /* the name may belong to another process now */
  /* A copy, because UCX reads the address as aligned words. */
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

int peer_drop(struct ucx *u, uint64_t handle) {
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

void peers_close(struct ucx *u) {
  for (uint32_t i = 0; i < MAX_PEERS; i++) {
    close_endpoint(u, &u->peers[i]);
  }
}
