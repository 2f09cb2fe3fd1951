/* A UCP context and worker: opened with the requested settings, published as an address,
 * released. */
#define _GNU_SOURCE
#include "dl/dl.h"
#include "ucx/worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int worker_name(struct ucx *u, const struct sluice_slot *c) {
  const char *name = (const char *)rings_command_payload(&u->rings, c);
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
    int s = ucx_status_of(u->api->config_modify(config, p, v));
    if (s != 0) {
      return s;
    }
    p = v + strlen(v) + 1;
  }
  return 0;
}

static int open_masked(struct ucx *u, const struct sluice_slot *c) {
  const struct ucx_api *f = u->api;
  const char *p = (const char *)rings_command_payload(&u->rings, c);
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
  int s = ucx_status_of(f->config_read(NULL, NULL, &config));
  if (s == 0 && config == NULL) {
    return SLUICE_GARBAGE;
  }
  if (s == 0 && (s = configure(u, config, p, p + c->len)) == 0) {
    struct ucx_params what;
    memset(&what, 0, sizeof what);
    what.field_mask = UCX_PARAM_FEATURES;
    what.features = UCX_FEATURE_AM | UCX_FEATURE_WAKEUP;
    s = ucx_status_of(f->init_version(UCX_API_MAJOR, UCX_API_MINOR, &what, config, &u->context));
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
    s = ucx_status_of(f->worker_create(u->context, &how, &u->worker));
    s = s == 0 && u->worker == NULL ? SLUICE_GARBAGE : s;
  }
  __atomic_fetch_or(&u->rings.shared->signals, sluice_signals_restore(), __ATOMIC_RELAXED);
  if (s == 0) {
    struct ucx_am_handler h;
    memset(&h, 0, sizeof h);
    h.field_mask = UCX_AM_HANDLER_ID | UCX_AM_HANDLER_CB | UCX_AM_HANDLER_ARG;
    h.id = AM_ID;
    h.cb = message_arrived;
    h.arg = u;
    s = ucx_status_of(f->worker_set_am_recv_handler(u->worker, &h));
  }
  if (s == 0) {
    s = ucx_status_of(f->worker_get_efd(u->worker, &u->efd));
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

/* UCX's own thread inherits the mask, so it receives no signal meant for Go. */
int worker_open(struct ucx *u, const struct sluice_slot *c) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int s = open_masked(u, c);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  return s;
}

void worker_metadata(struct ucx *u, uint64_t token) {
  void *address = NULL;
  size_t n = 0;
  int s = ucx_status_of(u->api->worker_get_address(u->worker, &address, &n));
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
  rings_leave_library(&u->rings);
  rings_answer(&u->rings, token, s, 0, blob, s == 0 ? head + n : 0);
  free(blob);
}

void worker_release(struct ucx *u) {
  peers_close(u);
  if (u->worker != NULL) {
    /* Completes the closes, and the sends in flight. */
    for (uint64_t end = rings_clock() + 200000000u; u->sends > 0 && rings_clock() < end;) {
      if (u->api->worker_progress(u->worker) == 0) {
        usleep(100);
      }
    }
    for (int i = 0; i < 100 && u->api->worker_progress(u->worker) > 0; i++) {
    }
    u->api->worker_destroy(u->worker); /* ends every remaining send */
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
  messages_forget(u);
}
