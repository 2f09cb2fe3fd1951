/* Active messages: received ones, which are queued while the ring is full, and sent ones. */
#define _GNU_SOURCE
#include "ucx/worker.h"

#include <stdlib.h>
#include <string.h>

static void unread(struct ucx *u) { __atomic_store_n(&u->rings.shared->unread, u->rings.shared->unread + 1, __ATOMIC_RELAXED); }

static int deliver(struct ucx *u, const void *from, size_t from_len, const void *data, size_t len) {
  if (rings_free_events(&u->rings) <= u->answers + 2) {
    return 0; /* an arrival can be queued; the end of a send cannot */
  }
  struct sluice_slot *e = rings_next_event(&u->rings);
  if (e == NULL) {
    return 0;
  }
  if (!rings_event_payload(&u->rings, e, from, from_len, data, len)) {
    unread(u);
    return 1;
  }
  e->op = SLUICE_EV_NOTIF;
  e->aux = (uint32_t)from_len;
  rings_publish(&u->rings);
  return 1;
}

void messages_release(struct ucx *u) {
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

/* The worker makes no progress while messages are queued, so the queue holds at most what
 * one call of progress delivers; further messages wait in the sockets and at the senders. */
ucx_status message_arrived(void *arg, const void *header, size_t header_len, void *data, size_t len, const struct ucx_am_recv *param) {
  struct ucx *u = arg;
  if ((param->recv_attr & UCX_AM_RECV_RNDV) != 0 || header_len == 0 || header_len > NAME_MAX_BYTES || len > MAX_MESSAGE) {
    unread(u); /* Sluice's senders send no such message */
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

void messages_forget(struct ucx *u) {
  while (u->held != NULL) {
    struct message *m = u->held;
    u->held = m->next;
    free(m);
  }
  u->held_end = &u->held;
}

struct send { /* one in flight; it owns the bytes that UCX reads */
  struct ucx *u;
  struct ucx_peer *peer;
  uint32_t generation;
  uint64_t token;
  unsigned char bytes[];
};

static void sent(void *request, ucx_status status, void *arg) {
  struct send *s = arg;
  struct ucx *u = s->u;
  if (status != UCX_OK && status != UCX_CANCELED && s->peer->generation == s->generation && s->peer->name != NULL) {
    peer_down(u, s->peer);
  }
  if (s->token != 0) {
    rings_answer(&u->rings, s->token, ucx_status_of(status), 0, NULL, 0);
  }
  if (s->peer->generation == s->generation) {
    s->peer->sends--;
    s->peer->moved = u->rings.now;
  }
  u->answers -= s->token != 0;
  u->sends--;
  free(s);
  if (request != NULL) {
    u->api->request_free(request);
  }
}

/* Reports whether a message must stay in the command ring, because its peer has many sends
 * in flight. Later commands then wait behind it, and producers see a full ring. It does
 * not wait for a peer that makes no progress, whose messages are rejected one by one. */
int message_waits(struct ucx *u, const struct sluice_slot *c) {
  const struct ucx_peer *p = c->op == SLUICE_OP_NOTIFY ? peer_at(u, c->handle) : NULL;
  return p != NULL && !p->dead && p->ep != NULL && p->sends >= MAX_PEER_SENDS && u->rings.now - p->moved < STILL_NS;
}

void message_send(struct ucx *u, const struct sluice_slot *c) {
  struct ucx_peer *p = peer_at(u, c->handle);
  int status = p == NULL ? SLUICE_BAD_HANDLE : p->dead || p->ep == NULL ? SLUICE_PEER_DEAD : c->len > MAX_MESSAGE ? SLUICE_BAD_PAYLOAD
               : u->sends >= MAX_SENDS || p->sends >= MAX_PEER_SENDS || u->answers > u->rings.evt_mask / 2             ? SLUICE_FULL
                                                                                                                 : 0;
  struct send *s = NULL;
  if (status == 0 && (s = malloc(sizeof *s + c->len + 1)) == NULL) {
    status = SLUICE_FULL;
  }
  if (status == 0) {
    *s = (struct send){u, p, p->generation, c->token};
    memcpy(s->bytes, rings_command_payload(&u->rings, c), c->len);
    struct ucx_request_param how;
    memset(&how, 0, sizeof how);
    how.op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS;
    how.flags = UCX_AM_SEND_EAGER;
    how.send = sent;
    how.user_data = s;
    if (p->sends++ == 0) {
      p->moved = u->rings.now;
    }
    u->sends++;
    u->answers += c->token != 0;
    void *r = u->api->am_send_nbx(p->ep, AM_ID, u->name, strlen(u->name), s->bytes, c->len, &how);
    if (r != NULL && !ucx_is_error(r)) {
      return; /* sent publishes the answer */
    }
    p->sends--;
    p->moved = u->rings.now;
    u->sends--;
    u->answers -= c->token != 0;
    free(s);
    if (r != NULL) {
      status = ucx_status_of(ucx_error_of(r));
      peer_down(u, p);
    }
  }
  if (c->token != 0) {
    rings_answer(&u->rings, c->token, status, 0, NULL, 0);
  }
}
