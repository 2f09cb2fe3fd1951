/* One function for each command except transfers. If the library returns success without
 * a result, the status is SLUICE_GARBAGE, which differs from an error of the library. */
#define _GNU_SOURCE
#include "cuda/cuda.h"
#include "dl/dl.h"
#include "nixl/agent.h"

#include <stdlib.h>
#include <string.h>

int agent_status(int s) { return s >= SLUICE_NIXL_NOT_FOUND && s <= SLUICE_NIXL_IN_PROG ? s : SLUICE_GARBAGE; }

/* The status of a call that has no "in progress": anything above success is garbage. */
static int plain(int s) { return s > 0 ? SLUICE_GARBAGE : agent_status(s); }

void agent_peer_down(struct agent *a, uint32_t i) {
  if (a->peers[i].dead) {
    return;
  }
  a->peers[i].dead = 1;
  struct sluice_slot *e = rings_next_event(&a->rings);
  if (e != NULL) {
    e->op = SLUICE_EV_PEER_DOWN;
    e->handle = (uint64_t)a->peers[i].generation << 32 | i;
    rings_publish(&a->rings);
  }
}

struct peer *agent_peer(struct agent *a, uint64_t handle) {
  uint32_t i = (uint32_t)handle;
  if (i >= MAX_PEERS || a->peers[i].name == NULL || a->peers[i].generation != handle >> 32) {
    return NULL;
  }
  return &a->peers[i];
}

static void library_free(const struct agent *a, void *p) {
  if (p == NULL) {
    return;
  }
  if (a->api->mem_free != NULL) {
    a->api->mem_free(p);
  } else {
    free(p);
  }
}

static int create(struct agent *a, const struct sluice_slot *c) {
  if (a->nixl != NULL) {
    return SLUICE_NIXL_INVALID_STATE;
  }
  const char *name = (const char *)rings_command_payload(&a->rings, c);
  if (c->len < 2 || name[c->len - 1] != '\0') {
    return SLUICE_BAD_PAYLOAD;
  }
  struct nixl_config config;
  memset(&config, 0, sizeof config);
  config.enable_prog_thread = (c->arg[0] & SLUICE_CREATE_PROGRESS) != 0;
  config.thread_sync = NIXL_SYNC_STRICT;
  config.num_workers = 1;
  config.pthr_delay_us = c->arg[1];
  config.lthr_delay_us = 100000;
  config.capture_telemetry = (c->arg[0] & SLUICE_CREATE_TELEMETRY) != 0;
  int s = plain(a->api->create_configured_agent(name, &config, &a->nixl));
  if (s == 0 && a->nixl == NULL) {
    return SLUICE_GARBAGE;
  }
  if (s != 0) {
    a->nixl = NULL;
    return s;
  }
  a->telemetry = config.capture_telemetry;
  a->own_progress = !config.enable_prog_thread;
  s = plain(a->api->create_notif_map(&a->notifs));
  return s == 0 && a->notifs == NULL ? SLUICE_GARBAGE : s;
}

struct text {
  char *at;
  size_t len;
};

static void text_add(struct text *t, const char *k, const char *separator, const char *v) {
  size_t n = strlen(k), m = strlen(separator), o = v != NULL ? strlen(v) : 0;
  char *grown = realloc(t->at, t->len + n + m + o + 1);
  if (grown == NULL) {
    return;
  }
  memcpy(grown + t->len, k, n);
  memcpy(grown + t->len + n, separator, m);
  if (o > 0) {
    memcpy(grown + t->len + n + m, v, o);
  }
  grown[t->len + n + m + o] = '\n';
  t->at = grown;
  t->len += n + m + o + 1;
}

/* The backend's effective parameters; empty if the library cannot report them. */
static void backend_parameters(struct agent *a, struct text *out) {
  const struct nixl_api *f = a->api;
  void *mems = NULL, *params = NULL, *it = NULL;
  bool empty = true;
  if (f->get_backend_params == NULL || f->params_create_iterator == NULL || f->params_iterator_next == NULL ||
      f->params_destroy_iterator == NULL || f->params_is_empty == NULL ||
      f->get_backend_params(a->nixl, a->backend, &mems, &params) != 0) {
    return;
  }
  if (params != NULL && f->params_is_empty(params, &empty) == 0 && !empty && f->params_create_iterator(params, &it) == 0 &&
      it != NULL) {
    bool more = true; /* whether another pair follows; false with the last one */
    for (int i = 0; more && i < 1000; i++) {
      const char *k = NULL, *v = NULL;
      if (f->params_iterator_next(it, &k, &v, &more) != 0 || k == NULL) {
        break;
      }
      text_add(out, k, "=", v);
    }
    f->params_destroy_iterator(it);
  }
  if (params != NULL) {
    f->destroy_params(params);
  }
  if (mems != NULL) {
    f->destroy_mem_list(mems);
  }
}

static int backend(struct agent *a, const struct sluice_slot *c, struct text *out) {
  const struct nixl_api *f = a->api;
  const char *p = (const char *)rings_command_payload(&a->rings, c), *end = p + c->len;
  if (a->nixl == NULL) {
    return SLUICE_NO_AGENT;
  }
  if (a->backend != NULL) {
    return SLUICE_NIXL_INVALID_STATE;
  }
  if (c->len < 2 || end[-1] != '\0') {
    return SLUICE_BAD_PAYLOAD;
  }
  const char *plugin = p;
  void *mems = NULL, *params = NULL;
  int s = plain(f->get_plugin_params(a->nixl, plugin, &mems, &params));
  if (s == 0 && params == NULL) {
    s = SLUICE_GARBAGE;
  }
  for (p += strlen(p) + 1; s == 0 && p < end;) {
    const char *k = p, *v = p + strlen(p) + 1;
    if (v >= end) {
      s = SLUICE_BAD_PAYLOAD;
      break;
    }
    s = plain(f->params_add(params, k, v));
    p = v + strlen(v) + 1;
  }
  if (s == 0) {
    /* With a progress thread, that thread handles arrivals before a wait here would end. */
    void *before = a->own_progress ? arrivals_before() : NULL;
    s = plain(f->create_backend(a->nixl, plugin, params, &a->backend));
    arrivals_find(a, before);
    if (s == 0 && a->backend == NULL) {
      s = SLUICE_GARBAGE;
    } else if (s != 0) {
      a->backend = NULL;
    }
  }
  if (params != NULL) {
    f->destroy_params(params);
  }
  if (mems != NULL) {
    f->destroy_mem_list(mems);
  }
  /* Restores the signal handlers that the backend's libraries replaced. */
  __atomic_fetch_or(&a->rings.shared->signals, sluice_signals_restore(), __ATOMIC_RELAXED);
  if (s == 0) {
    s = plain(f->create_opt_args(&a->options));
    s = s == 0 && a->options == NULL ? SLUICE_GARBAGE : s;
  }
  if (s == 0) {
    s = plain(f->opt_args_add_backend(a->options, a->backend));
  }
  if (s == 0) {
    backend_parameters(a, out);
  }
  return s;
}

static int plugins(struct agent *a, struct text *out) {
  void *list = NULL;
  size_t n = 0;
  int s = plain(a->api->get_available_plugins(a->nixl, &list));
  if (s != 0 || list == NULL) {
    return s != 0 ? s : SLUICE_GARBAGE;
  }
  s = plain(a->api->string_list_size(list, &n));
  for (size_t i = 0; s == 0 && i < n && i < 1000; i++) {
    const char *name = NULL;
    s = plain(a->api->string_list_get(list, i, &name));
    if (s == 0 && name != NULL) {
      text_add(out, name, "", "");
    }
  }
  a->api->destroy_string_list(list);
  return s;
}

/* Registration and deregistration take the same list. */
static int region_call(struct agent *a, const struct region *r, int (*call)(void *, void *, void *)) {
  void *list = NULL;
  int s = plain(a->api->create_reg_dlist(r->type, &list));
  if (s != 0 || list == NULL) {
    return s != 0 ? s : SLUICE_GARBAGE;
  }
  s = plain(a->api->reg_dlist_add_desc(list, (uintptr_t)r->addr, (size_t)r->len, r->dev, NULL, 0));
  if (s == 0) {
    s = plain(call(a->nixl, list, a->options));
  }
  a->api->destroy_reg_dlist(list);
  return s;
}

static int add_region(struct agent *a, const struct sluice_slot *c, uint64_t *handle) {
  for (uint32_t i = 0; i < MAX_REGIONS; i++) {
    struct region *r = &a->regions[i];
    if (r->used) {
      continue;
    }
    r->addr = c->arg[0];
    r->len = c->arg[1];
    r->dev = c->arg[2] & 0xffffffffu;
    r->type = (int)(c->arg[2] >> 32);
    if (r->type == 1) {
      sluice_cuda_bind((int)r->dev); /* the library asks the driver about the address in this thread */
    }
    int s = region_call(a, r, a->api->register_mem);
    if (s == 0) {
      r->used = 1;
      r->generation++;
      *handle = (uint64_t)r->generation << 32 | i;
    }
    return s;
  }
  return SLUICE_FULL;
}

static int drop_region(struct agent *a, uint64_t handle) {
  uint32_t i = (uint32_t)handle;
  if (i >= MAX_REGIONS || !a->regions[i].used || a->regions[i].generation != handle >> 32) {
    return SLUICE_BAD_HANDLE;
  }
  int s = region_call(a, &a->regions[i], a->api->deregister_mem);
  a->regions[i].used = s != 0;
  return s;
}

static int load_once(struct agent *a, const struct sluice_slot *c, char **name) {
  int s = plain(a->api->load_remote_md(a->nixl, rings_command_payload(&a->rings, c), c->len, name));
  if (s == 0 && (*name == NULL || (*name)[0] == '\0')) {
    s = SLUICE_GARBAGE;
  }
  return s;
}

static int load_peer(struct agent *a, const struct sluice_slot *c, uint64_t *handle, char **name) {
  int s = load_once(a, c, name);
  if (s != 0) {
    return s;
  }
  uint32_t empty = MAX_PEERS;
  for (uint32_t i = 0; i < MAX_PEERS; i++) {
    struct peer *p = &a->peers[i];
    if (p->name == NULL) {
      empty = empty == MAX_PEERS ? i : empty;
    } else if (strcmp(p->name, *name) == 0) {
      if (p->dead) { /* its endpoints have failed too: load it again */
        library_free(a, *name);
        *name = NULL;
        a->api->invalidate_remote_md(a->nixl, p->name);
        s = load_once(a, c, name);
        p->dead = s != 0;
      }
      *handle = (uint64_t)p->generation << 32 | i;
      return s;
    }
  }
  if (empty == MAX_PEERS) {
    a->api->invalidate_remote_md(a->nixl, *name);
    return SLUICE_FULL;
  }
  struct peer *p = &a->peers[empty];
  p->name = strdup(*name);
  if (p->name == NULL) {
    return SLUICE_FULL;
  }
  p->dead = 0;
  p->generation++;
  *handle = (uint64_t)p->generation << 32 | empty;
  return 0;
}

static int drop_peer(struct agent *a, uint64_t handle) {
  struct peer *p = agent_peer(a, handle);
  if (p == NULL) {
    return SLUICE_BAD_HANDLE;
  }
  int s = plain(a->api->invalidate_remote_md(a->nixl, p->name));
  free(p->name);
  p->name = NULL;
  return s;
}

static int notify(struct agent *a, const struct sluice_slot *c) {
  struct peer *p = agent_peer(a, c->handle);
  if (p == NULL) {
    return SLUICE_BAD_HANDLE;
  }
  if (p->dead) {
    return SLUICE_PEER_DEAD; /* the library would print a line for each send */
  }
  int s = plain(a->api->gen_notif(a->nixl, p->name, rings_command_payload(&a->rings, c), c->len, a->options));
  if (s == SLUICE_NIXL_BACKEND) {
    agent_peer_down(a, (uint32_t)c->handle);
  }
  return s;
}

static int add_board(struct agent *a, const struct sluice_slot *c) {
  if (a->board_count == MAX_BOARDS) {
    return SLUICE_FULL;
  }
  if (c->arg[0] == 0 || c->arg[1] == 0 || c->arg[2] == 0 || (c->arg[0] | c->arg[1]) % 8 != 0) {
    return SLUICE_BAD_PAYLOAD;
  }
  struct board *b = &a->boards[a->board_count++];
  b->control = (struct sluice_board *)(uintptr_t)c->arg[0];
  b->slots = (struct sluice_record *)(uintptr_t)c->arg[1];
  b->count = c->arg[2];
  b->cursor = 0;
  return 0;
}

static int peer_call(struct agent *a, const struct sluice_slot *c) {
  struct peer *p = agent_peer(a, c->handle);
  if (p == NULL) {
    return SLUICE_BAD_HANDLE;
  }
  if (c->op == SLUICE_OP_CONNECT) {
    return a->api->agent_make_connection == NULL ? SLUICE_MISSING : plain(a->api->agent_make_connection(a->nixl, p->name, a->options));
  }
  return a->api->check_remote_md == NULL ? SLUICE_MISSING : plain(a->api->check_remote_md(a->nixl, p->name, NULL));
}

void agent_release_all(struct agent *a) {
  const struct nixl_api *f = a->api;
  transfers_abandon(a);
  if (a->nixl != NULL) {
    for (uint32_t i = 0; i < MAX_REGIONS; i++) {
      if (a->regions[i].used) {
        region_call(a, &a->regions[i], f->deregister_mem);
      }
    }
  }
  for (uint32_t i = 0; i < MAX_PEERS; i++) {
    if (a->peers[i].name != NULL) {
      f->invalidate_remote_md(a->nixl, a->peers[i].name);
      free(a->peers[i].name);
      a->peers[i].name = NULL;
    }
  }
  if (a->notifs != NULL) {
    f->destroy_notif_map(a->notifs);
  }
  if (a->options != NULL) {
    f->destroy_opt_args(a->options);
  }
  if (a->backend != NULL) {
    f->destroy_backend(a->backend);
  }
  if (a->nixl != NULL) {
    f->destroy_agent(a->nixl);
  }
  a->nixl = a->backend = a->options = a->notifs = NULL;
  a->board_count = 0;
}

void agent_execute(struct agent *a, struct sluice_slot *c) {
  struct text out = {NULL, 0};
  uint64_t handle = 0;
  int status = SLUICE_BAD_PAYLOAD;
  if (c->op > SLUICE_OP_BACKEND && c->op < SLUICE_OP_STOP && c->op != SLUICE_OP_PLUGINS && a->backend == NULL) {
    rings_answer(&a->rings, c->token, SLUICE_NO_AGENT, 0, NULL, 0);
    return;
  }
  if (c->op == SLUICE_OP_PLUGINS && a->nixl == NULL) {
    rings_answer(&a->rings, c->token, SLUICE_NO_AGENT, 0, NULL, 0);
    return;
  }
  rings_enter_library(&a->rings, c->op);
  switch (c->op) {
  case SLUICE_OP_CREATE: status = create(a, c); break;
  case SLUICE_OP_BACKEND: status = backend(a, c, &out); break;
  case SLUICE_OP_PLUGINS: status = plugins(a, &out); break;
  case SLUICE_OP_REGISTER: status = add_region(a, c, &handle); break;
  case SLUICE_OP_DEREGISTER: status = drop_region(a, c->handle); break;
  case SLUICE_OP_INVALIDATE: status = drop_peer(a, c->handle); break;
  case SLUICE_OP_CHECK:
  case SLUICE_OP_CONNECT: status = peer_call(a, c); break;
  case SLUICE_OP_BOARD:
    status = add_board(a, c);
    handle = a->board_count - 1;
    break;
  case SLUICE_OP_METADATA: {
    void *blob = NULL;
    size_t n = 0;
    status = plain(a->api->get_local_md(a->nixl, &blob, &n));
    if (status == 0 && (blob == NULL || n == 0 || n > SLUICE_BIG_MAX)) {
      status = SLUICE_GARBAGE;
    }
    rings_leave_library(&a->rings);
    rings_answer(&a->rings, c->token, status, 0, status == 0 ? blob : NULL, status == 0 ? n : 0);
    if (status == 0) {
      library_free(a, blob);
    }
    return;
  }
  case SLUICE_OP_LOAD: {
    char *name = NULL;
    status = load_peer(a, c, &handle, &name);
    rings_leave_library(&a->rings);
    rings_answer(&a->rings, c->token, status, handle, name, status == 0 ? strlen(name) : 0);
    library_free(a, name);
    return;
  }
  case SLUICE_OP_NOTIFY:
    status = notify(a, c);
    rings_leave_library(&a->rings);
    if (c->token != 0) {
      rings_answer(&a->rings, c->token, status, c->handle, NULL, 0);
    }
    return;
  case SLUICE_OP_TRANSFER:
    transfer_start(a, c);
    rings_leave_library(&a->rings);
    return;
  case SLUICE_OP_CANCEL:
    transfer_cancel(a, c);
    rings_leave_library(&a->rings);
    return;
  case SLUICE_OP_STOP:
    agent_release_all(a);
    a->rings.stopping = 1;
    status = 0;
    break;
  default: break;
  }
  rings_leave_library(&a->rings);
  rings_answer(&a->rings, c->token, status, handle, out.at, out.len);
  free(out.at);
}
