/* A libnixl_capi for tests: agents of one process, in memory, that do what NIXL
 * does, or what a test asks of a function by fake_set: any status, success without
 * a result (FAKE_EMPTY), or not coming back (FAKE_HANG) until fake_reset. Its
 * handles come from malloc, so that a sanitizer sees what is not given back. */
#define _GNU_SOURCE
#include "fake_control.h"
#include "nixl/api.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#define MAX_AGENTS 16
#define MAX_INBOX 4096

/* Each call begins so: a forced status is the answer; EMPTY leaves the results. */
#define ENTER(name)                        \
  do {                                     \
    int answer_ = enter(name);             \
    if (answer_ == FAKE_EMPTY) return 0;   \
    if (answer_ != FAKE_NORMAL) return answer_; \
  } while (0)

struct fake_agent {
  char name[64];
  int epoll, arrived; /* an epoll descriptor and what is in it, as UCX's; or 0 */
  int stranger;       /* an epoll descriptor as of others, always ready */
  int n;
  struct {
    char from[64];
    char *data;
    size_t len;
  } inbox[MAX_INBOX];
};
struct list {
  int n;
  struct {
    uintptr_t addr;
    size_t len;
  } d[64];
};
struct options {
  char *message;
  size_t len;
  bool has;
};
struct request {
  struct list local, remote;
  int write, polls;
  bool posted, released, has;
  char peer[64], *message;
  size_t len;
};
struct map {
  struct fake_agent *taken; /* a copy of the inbox */
};

static struct fake_agent *agents[MAX_AGENTS];

static struct fake_agent *agent_named(const char *name) {
  for (int i = 0; i < MAX_AGENTS; i++) {
    if (agents[i] != NULL && strcmp(agents[i]->name, name) == 0) {
      return agents[i];
    }
  }
  return NULL;
}

static void *blank(size_t n) {
  void *p = calloc(1, n);
  if (p == NULL) {
    abort();
  }
  return p;
}

/* Tests that cannot reach fake_set name a call that hangs in the environment. */
__attribute__((constructor)) static void from_environment(void) {
  const char *name = getenv("FAKE_NIXL_HANG");
  if (name != NULL) {
    fake_set(name, FAKE_HANG, 0);
  }
}

EXPORT bool nixl_capi_is_stub(void) {
#ifdef FAKE_STUB
  return true;
#else
  return false;
#endif
}

EXPORT int nixl_capi_create_configured_agent(const char *name, const struct nixl_config *c, void **agent) {
  ENTER("create_configured_agent");
  if (c->thread_sync != NIXL_SYNC_STRICT) {
    return -1;
  }
  struct fake_agent *a = blank(sizeof *a);
  snprintf(a->name, sizeof a->name, "%s", name);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_AGENTS; i++) {
    if (agents[i] == NULL) {
      agents[i] = a;
      break;
    }
  }
  pthread_mutex_unlock(&lock);
  *agent = a;
  return 0;
}

static void clear_inbox(struct fake_agent *a) {
  for (int i = 0; i < a->n; i++) {
    free(a->inbox[i].data);
  }
  a->n = 0;
}

EXPORT int nixl_capi_destroy_agent(void *agent) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_AGENTS; i++) {
    if (agents[i] == agent) {
      agents[i] = NULL;
    }
  }
  pthread_mutex_unlock(&lock);
  clear_inbox(agent);
  struct fake_agent *a = agent;
  if (a->epoll > 0) {
    close(a->epoll);
    close(a->stranger);
    close(a->arrived > 0 ? a->arrived : -a->arrived);
  }
  free(agent);
  return 0;
}

EXPORT int nixl_capi_get_local_md(void *agent, void **data, size_t *len) {
  ENTER("get_local_md");
  struct fake_agent *a = agent;
  *data = strdup(a->name);
  *len = strlen(a->name);
  return 0;
}

EXPORT int nixl_capi_load_remote_md(void *agent, const void *data, size_t len, char **name) {
  (void)agent;
  ENTER("load_remote_md");
  if (len == 0 || len > 63) {
    return -2;
  }
  *name = strndup(data, len);
  return 0;
}

EXPORT int nixl_capi_invalidate_remote_md(void *agent, const char *name) {
  (void)agent;
  (void)name;
  ENTER("invalidate_remote_md");
  return 0;
}

EXPORT int nixl_capi_check_remote_md(void *agent, const char *name, void *descs) {
  (void)agent;
  (void)name;
  (void)descs;
  ENTER("check_remote_md");
  return 0;
}

EXPORT int nixl_capi_get_available_plugins(void *agent, void **list) {
  (void)agent;
  ENTER("get_available_plugins");
  *list = blank(1);
  return 0;
}
EXPORT int nixl_capi_destroy_string_list(void *list) {
  free(list);
  return 0;
}
EXPORT int nixl_capi_string_list_size(void *list, size_t *n) {
  (void)list;
  ENTER("string_list_size");
  *n = 2;
  return 0;
}
EXPORT int nixl_capi_string_list_get(void *list, size_t i, const char **s) {
  (void)list;
  ENTER("string_list_get");
  *s = i == 0 ? "UCX" : "POSIX";
  return 0;
}

EXPORT int nixl_capi_get_plugin_params(void *agent, const char *plugin, void **mems, void **params) {
  (void)agent;
  (void)plugin;
  ENTER("get_plugin_params");
  *mems = blank(1);
  *params = blank(1);
  return 0;
}
EXPORT int nixl_capi_destroy_mem_list(void *p) {
  free(p);
  return 0;
}
EXPORT int nixl_capi_destroy_params(void *p) {
  free(p);
  return 0;
}
EXPORT int nixl_capi_params_add(void *p, const char *k, const char *v) {
  (void)p;
  (void)k;
  (void)v;
  ENTER("params_add");
  return 0;
}

static void foreign_handler(int s) { (void)s; }

/* Descriptors that tell of arrivals: FAKE_ARRIVALS, ones that are true; FAKE_ALWAYS, ones
 * that are always ready; FAKE_NEVER, never. */
static void open_arrivals(struct fake_agent *a, int how) {
  a->epoll = epoll_create1(0);
  a->stranger = epoll_create1(EPOLL_CLOEXEC);
  int fd = eventfd(how == FAKE_ALWAYS, EFD_NONBLOCK | EFD_CLOEXEC);
  struct epoll_event e = {.events = EPOLLIN};
  if (a->epoll < 0 || fd < 0 || epoll_ctl(a->epoll, EPOLL_CTL_ADD, fd, &e) != 0) {
    abort();
  }
  e.events = EPOLLOUT; /* an eventfd can be written to */
  if (a->stranger < 0 || epoll_ctl(a->stranger, EPOLL_CTL_ADD, fd, &e) != 0) {
    abort();
  }
  a->arrived = how == FAKE_ARRIVALS ? fd : -fd;
}

EXPORT int nixl_capi_create_backend(void *agent, const char *plugin, void *params, void **backend) {
  int how = enter("arrivals");
  if (how >= FAKE_ARRIVALS) {
    open_arrivals(agent, how);
  }
  (void)plugin;
  (void)params;
  if (enter("take_signal") == 1) {
    signal(SIGHUP, foreign_handler); /* as UCX does */
  }
  ENTER("create_backend");
  *backend = blank(1);
  return 0;
}
EXPORT int nixl_capi_destroy_backend(void *p) {
  free(p);
  return 0;
}

EXPORT int nixl_capi_create_opt_args(void **o) {
  ENTER("create_opt_args");
  *o = blank(sizeof(struct options));
  return 0;
}
EXPORT int nixl_capi_destroy_opt_args(void *o) {
  free(((struct options *)o)->message);
  free(o);
  return 0;
}
EXPORT int nixl_capi_opt_args_add_backend(void *o, void *b) {
  (void)o;
  (void)b;
  ENTER("opt_args_add_backend");
  return 0;
}
EXPORT int nixl_capi_opt_args_set_notif_msg(void *o, const void *data, size_t len) {
  ENTER("opt_args_set_notif_msg");
  struct options *p = o;
  p->message = blank(len + 1);
  memcpy(p->message, data, len);
  p->len = len;
  return 0;
}
EXPORT int nixl_capi_opt_args_set_has_notif(void *o, bool has) {
  ENTER("opt_args_set_has_notif");
  ((struct options *)o)->has = has;
  return 0;
}

EXPORT int nixl_capi_create_reg_dlist(int type, void **l) {
  (void)type;
  ENTER("create_reg_dlist");
  *l = blank(sizeof(struct list));
  return 0;
}
EXPORT int nixl_capi_destroy_reg_dlist(void *l) {
  free(l);
  return 0;
}
EXPORT int nixl_capi_reg_dlist_add_desc(void *l, uintptr_t addr, size_t len, uint64_t dev, const void *m, size_t n) {
  (void)l;
  (void)addr;
  (void)len;
  (void)dev;
  (void)m;
  (void)n;
  ENTER("reg_dlist_add_desc");
  return 0;
}
EXPORT int nixl_capi_register_mem(void *a, void *l, void *o) {
  (void)a;
  (void)l;
  (void)o;
  ENTER("register_mem");
  return 0;
}
EXPORT int nixl_capi_deregister_mem(void *a, void *l, void *o) {
  (void)a;
  (void)l;
  (void)o;
  ENTER("deregister_mem");
  return 0;
}

EXPORT int nixl_capi_create_xfer_dlist(int type, void **l) {
  (void)type;
  ENTER("create_xfer_dlist");
  *l = blank(sizeof(struct list));
  return 0;
}
EXPORT int nixl_capi_destroy_xfer_dlist(void *l) {
  free(l);
  return 0;
}
EXPORT int nixl_capi_xfer_dlist_add_desc(void *l, uintptr_t addr, size_t len, uint64_t dev) {
  (void)dev;
  ENTER("xfer_dlist_add_desc");
  struct list *x = l;
  if (x->n == 64) {
    return -1;
  }
  x->d[x->n].addr = addr;
  x->d[x->n++].len = len;
  return 0;
}

EXPORT int nixl_capi_create_xfer_req(void *a, int op, void *local, void *remote, const char *peer, void **req, void *o) {
  (void)a;
  ENTER("create_xfer_req");
  struct request *r = blank(sizeof *r);
  const struct options *opt = o;
  r->local = *(struct list *)local;
  r->remote = *(struct list *)remote;
  r->write = op;
  snprintf(r->peer, sizeof r->peer, "%s", peer);
  r->has = opt->has;
  if (opt->has) {
    r->message = blank(opt->len + 1);
    memcpy(r->message, opt->message, opt->len);
    r->len = opt->len;
  }
  *req = r;
  return 0;
}

static int deliver(const char *from, const char *to, const void *data, size_t len) {
  pthread_mutex_lock(&lock);
  struct fake_agent *a = agent_named(to);
  int s = -2;
  if (a != NULL && a->n < MAX_INBOX) {
    snprintf(a->inbox[a->n].from, sizeof a->inbox[0].from, "%s", from);
    a->inbox[a->n].data = blank(len + 1);
    memcpy(a->inbox[a->n].data, data, len);
    a->inbox[a->n++].len = len;
    s = 0;
    if (a->arrived > 0 && eventfd_write(a->arrived, 1) != 0) {
      abort();
    }
  }
  pthread_mutex_unlock(&lock);
  return s;
}

static int finish(struct fake_agent *a, struct request *r) {
  for (int i = 0; i < r->local.n; i++) {
    void *l = (void *)r->local.d[i].addr, *m = (void *)r->remote.d[i].addr;
    memcpy(r->write ? m : l, r->write ? l : m, r->local.d[i].len);
  }
  return r->has ? deliver(a->name, r->peer, r->message, r->len) : 0;
}

EXPORT int nixl_capi_post_xfer_req(void *a, void *req, void *o) {
  (void)o;
  ENTER("post_xfer_req");
  struct request *r = req;
  r->posted = true;
  pthread_mutex_lock(&lock);
  r->polls = pending;
  pthread_mutex_unlock(&lock);
  return r->polls > 0 ? 1 : finish(a, r);
}
EXPORT int nixl_capi_get_xfer_status(void *a, void *req) {
  ENTER("get_xfer_status");
  struct request *r = req;
  return --r->polls > 0 ? 1 : finish(a, r);
}
EXPORT int nixl_capi_release_xfer_req(void *a, void *req) {
  (void)a;
  ENTER("release_xfer_req");
  struct request *r = req;
  r->released = true;
  return 0;
}
EXPORT int nixl_capi_destroy_xfer_req(void *req) {
  struct request *r = req;
  if (!r->released) {
    return -3;
  }
  free(r->message);
  free(r);
  return 0;
}
#ifndef FAKE_OLD
EXPORT int nixl_capi_get_xfer_telemetry(void *a, void *req, struct nixl_telemetry *t) {
  (void)a;
  ENTER("get_xfer_telemetry");
  t->total_bytes = ((struct request *)req)->local.d[0].len;
  t->xfer_duration_us = 7;
  return 0;
}
#endif

EXPORT int nixl_capi_create_notif_map(void **m) {
  ENTER("create_notif_map");
  *m = blank(sizeof(struct map));
  return 0;
}
EXPORT int nixl_capi_notif_map_clear(void *m) {
  struct map *x = m;
  if (x->taken != NULL) {
    clear_inbox(x->taken);
    free(x->taken);
    x->taken = NULL;
  }
  return 0;
}
EXPORT int nixl_capi_destroy_notif_map(void *m) {
  nixl_capi_notif_map_clear(m);
  free(m);
  return 0;
}
EXPORT int nixl_capi_get_notifs(void *agent, void *m, void *o) {
  (void)o;
  ENTER("get_notifs");
  struct fake_agent *a = agent;
  struct map *x = m;
  pthread_mutex_lock(&lock);
  eventfd_t count;
  if (a->arrived > 0) {
    eventfd_read(a->arrived, &count);
  }
  if (a->n > 0) {
    if (x->taken != NULL) {
      abort(); /* the reader forgot to clear */
    }
    x->taken = blank(sizeof *a);
    *x->taken = *a;
    a->n = 0;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}
/* One sender per map, which is enough here: the first one's name. */
EXPORT int nixl_capi_notif_map_size(void *m, size_t *n) {
  int s = enter("notif_map_size");
  if (s == FAKE_EMPTY) {
    *n = (size_t)-1;
    return 0;
  }
  if (s != FAKE_NORMAL) {
    return s;
  }
  *n = ((struct map *)m)->taken != NULL;
  return 0;
}
EXPORT int nixl_capi_notif_map_get_agent_at(void *m, size_t i, const char **name) {
  (void)i;
  ENTER("notif_map_get_agent_at");
  *name = ((struct map *)m)->taken->inbox[0].from;
  return 0;
}
EXPORT int nixl_capi_notif_map_get_notifs_size(void *m, const char *name, size_t *n) {
  (void)name;
  ENTER("notif_map_get_notifs_size");
  *n = (size_t)((struct map *)m)->taken->n;
  return 0;
}
EXPORT int nixl_capi_notif_map_get_notif(void *m, const char *name, size_t i, const void **data, size_t *len) {
  (void)name;
  int s = enter("notif_map_get_notif");
  if (s == FAKE_EMPTY) {
    *len = (size_t)-1; /* garbage: a length no message has */
    return 0;
  }
  if (s != FAKE_NORMAL) {
    return s;
  }
  const struct fake_agent *a = ((struct map *)m)->taken;
  *data = a->inbox[i].data;
  *len = a->inbox[i].len;
  return 0;
}
#ifndef FAKE_OLD
EXPORT int nixl_capi_gen_notif(void *agent, const char *to, const void *data, size_t len, void *o) {
  (void)o;
  ENTER("gen_notif");
  return deliver(((struct fake_agent *)agent)->name, to, data, len);
}
#endif
