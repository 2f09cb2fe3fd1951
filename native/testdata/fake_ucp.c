/* A libucp for tests: workers of one process, in memory, that do what UCP does, or
 * what a test asks of a function by fake_set: a status, success without a result
 * (FAKE_EMPTY), not coming back (FAKE_HANG) until fake_reset, and for a send also a
 * request that ends later (FAKE_LATER, with the status of fake_pending, and not as long
 * as that is FAKE_LATER itself). Its handles
 * come from malloc, so that a sanitizer sees what is not given back. */
#define _GNU_SOURCE
#include "fake_control.h"
#include "ucx/api.h"

#include <sys/eventfd.h>

#define FAKE_LATER 12345
#ifndef FAKE_MINOR
#define FAKE_MINOR 23
#endif

static int live; /* handles that were not given back */
EXPORT int fake_live(void) { return __atomic_load_n(&live, __ATOMIC_SEQ_CST); }

static void *make(size_t n) {
  __atomic_fetch_add(&live, 1, __ATOMIC_SEQ_CST);
  return calloc(1, n);
}
static void drop(void *p) {
  __atomic_fetch_sub(&live, 1, __ATOMIC_SEQ_CST);
  free(p);
}

/* A call with a result at *out: of a status that a test asked for, or ok. */
#define RESULT(name, out, value)           \
  do {                                     \
    int answer_ = enter(name);             \
    if (answer_ == FAKE_EMPTY) {           \
      return 0;                            \
    }                                      \
    if (answer_ != FAKE_NORMAL) {          \
      return (ucx_status)answer_;          \
    }                                      \
    *(out) = (value);                      \
  } while (0)

struct packet {
  struct packet *next;
  size_t header, data;
  unsigned char bytes[];
};

struct request {
  struct request *next;
  void (*send)(void *, ucx_status, void *);
  void *user;
};

struct worker {
  uint64_t id;
  int efd;
  struct ucx_am_handler handler;
  struct packet *first, **last;
  struct request *requests;
  struct endpoint *broken; /* its error handler is to be called */
};

struct endpoint {
  struct worker *from;
  uint64_t to;
  ucx_error_callback cb;
  void *arg;
};

static struct worker *workers[8];

static struct worker *worker_of(uint64_t id) {
  for (int i = 0; i < 8; i++) {
    if (workers[i] != NULL && workers[i]->id == id) {
      return workers[i];
    }
  }
  return NULL;
}

EXPORT void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1, *b = FAKE_MINOR, *c = 0; }

EXPORT ucx_status ucp_config_read(const char *prefix, const char *file, void **out) {
  (void)prefix, (void)file;
  RESULT("config_read", out, make(8));
  return 0;
}
EXPORT ucx_status ucp_config_modify(void *c, const char *k, const char *v) {
  (void)c, (void)v;
  int answer = enter("config_modify");
  return answer != FAKE_NORMAL ? (ucx_status)answer : strcmp(k, "TLS") == 0 ? 0 : -12;
}
EXPORT void ucp_config_release(void *c) { drop(c); }
EXPORT ucx_status ucp_init_version(unsigned major, unsigned minor, const struct ucx_params *p, const void *config, void **out) {
  (void)config;
  if (major != 1 || minor != 13 || p->features != (UCX_FEATURE_AM | UCX_FEATURE_WAKEUP)) {
    return UCX_INVALID_PARAM;
  }
  RESULT("init_version", out, make(8));
  return 0;
}
EXPORT void ucp_cleanup(void *c) { drop(c); }

EXPORT ucx_status ucp_worker_create(void *c, const struct ucx_worker_params *p, void **out) {
  static uint64_t next;
  (void)c, (void)p;
  RESULT("worker_create", out, NULL);
  struct worker *w = make(sizeof *w);
  w->efd = eventfd(0, EFD_NONBLOCK);
  w->last = &w->first;
  pthread_mutex_lock(&lock);
  w->id = ++next;
  for (int i = 0; i < 8; i++) {
    if (workers[i] == NULL) {
      workers[i] = w;
      break;
    }
  }
  pthread_mutex_unlock(&lock);
  *out = w;
  return 0;
}

EXPORT void ucp_worker_destroy(void *p) {
  struct worker *w = p;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 8; i++) {
    if (workers[i] == w) {
      workers[i] = NULL;
    }
  }
  pthread_mutex_unlock(&lock);
  while (w->requests != NULL) {
    struct request *r = w->requests;
    w->requests = r->next;
    r->send(r, UCX_CANCELED, r->user);
  }
  while (w->first != NULL) {
    struct packet *q = w->first;
    w->first = q->next;
    free(q);
  }
  close(w->efd);
  drop(w);
}

EXPORT ucx_status ucp_worker_get_address(void *p, void **out, size_t *n) {
  *n = sizeof(uint64_t);
  RESULT("worker_get_address", out, make(sizeof(uint64_t)));
  memcpy(*out, &((struct worker *)p)->id, sizeof(uint64_t));
  return 0;
}
EXPORT void ucp_worker_release_address(void *p, void *address) {
  (void)p;
  drop(address);
}
EXPORT ucx_status ucp_worker_get_efd(void *p, int *fd) {
  RESULT("worker_get_efd", fd, ((struct worker *)p)->efd);
  return 0;
}

EXPORT ucx_status ucp_worker_arm(void *p) {
  struct worker *w = p;
  int answer = enter("worker_arm");
  if (answer != FAKE_NORMAL) {
    return (ucx_status)answer;
  }
  pthread_mutex_lock(&lock);
  uint64_t n;
  ssize_t ignored = read(w->efd, &n, sizeof n);
  (void)ignored;
  int busy = w->first != NULL || (w->requests != NULL && pending != FAKE_LATER) || w->broken != NULL;
  pthread_mutex_unlock(&lock);
  return busy ? UCX_BUSY : 0;
}

EXPORT unsigned ucp_worker_progress(void *p) {
  struct worker *w = p;
  enter("worker_progress");
  pthread_mutex_lock(&lock);
  struct packet *all = w->first;
  struct request *requests = pending == FAKE_LATER ? NULL : w->requests;
  struct endpoint *broken = w->broken;
  int status = pending; /* fake_pending: the end of later sends */
  w->first = NULL, w->last = &w->first, w->broken = NULL;
  if (requests != NULL) {
    w->requests = NULL;
  }
  pthread_mutex_unlock(&lock);
  unsigned did = 0;
  for (; all != NULL; did++) {
    struct packet *q = all;
    all = q->next;
    struct ucx_am_recv param = {0, NULL};
    int answer = enter("am_recv"); /* a test makes it a rendezvous */
    param.recv_attr = answer == FAKE_LATER ? UCX_AM_RECV_RNDV : 0;
    w->handler.cb(w->handler.arg, q->bytes, q->header, q->bytes + q->header, q->data, &param);
    free(q);
  }
  for (; requests != NULL; did++) {
    struct request *r = requests;
    requests = r->next;
    r->send(r, (ucx_status)status, r->user);
  }
  if (broken != NULL) {
    broken->cb(broken->arg, broken, -25);
    did++;
  }
  return did;
}

EXPORT ucx_status ucp_worker_set_am_recv_handler(void *p, const struct ucx_am_handler *h) {
  int answer = enter("worker_set_am_recv_handler");
  if (answer != FAKE_NORMAL) {
    return (ucx_status)answer;
  }
  ((struct worker *)p)->handler = *h;
  return 0;
}

EXPORT ucx_status ucp_ep_create(void *p, const struct ucx_ep_params *e, void **out) {
  RESULT("ep_create", out, make(sizeof(struct endpoint)));
  struct endpoint *ep = *out;
  ep->from = p;
  memcpy(&ep->to, e->address, sizeof ep->to);
  ep->cb = e->err_handler.cb;
  ep->arg = e->err_handler.arg;
  return 0;
}

EXPORT void *ucp_ep_close_nbx(void *p, const struct ucx_request_param *how) {
  struct endpoint *ep = p;
  (void)how;
  enter("ep_close_nbx");
  pthread_mutex_lock(&lock);
  if (ep->from->broken == ep) {
    ep->from->broken = NULL;
  }
  pthread_mutex_unlock(&lock);
  drop(ep);
  return NULL;
}

EXPORT void *ucp_am_send_nbx(void *p, unsigned id, const void *header, size_t header_len, const void *data, size_t len,
                             const struct ucx_request_param *how) {
  struct endpoint *ep = p;
  int answer = enter("am_send_nbx");
  if (id != 7 || answer < 0) {
    return (void *)(intptr_t)(answer < 0 ? answer : UCX_INVALID_PARAM);
  }
  uint64_t one = 1;
  pthread_mutex_lock(&lock);
  struct worker *to = worker_of(ep->to);
  if (to == NULL) { /* told by the error handler, as a reset connection is */
    ep->from->broken = ep;
    to = ep->from;
  } else {
    struct packet *q = malloc(sizeof *q + header_len + len);
    q->next = NULL, q->header = header_len, q->data = len;
    memcpy(q->bytes, header, header_len);
    memcpy(q->bytes + header_len, data, len);
    *to->last = q;
    to->last = &q->next;
  }
  ssize_t ignored = write(to->efd, &one, sizeof one);
  struct request *r = NULL;
  if (answer == FAKE_LATER) {
    r = make(sizeof *r);
    r->send = how->send;
    r->user = how->user_data;
    r->next = ep->from->requests;
    ep->from->requests = r;
    ignored = write(ep->from->efd, &one, sizeof one);
  }
  (void)ignored;
  pthread_mutex_unlock(&lock);
  return r;
}

EXPORT ucx_status ucp_request_check_status(void *r) {
  (void)r;
  return 0;
}
EXPORT void ucp_request_free(void *r) { drop(r); }
