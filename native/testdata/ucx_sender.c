/* A sender of active messages that is no agent of ours: sends COUNT messages, one
 * a millisecond, each the time it was sent (CLOCK_REALTIME, ns, decimal), so that
 * the receiver alone is measured. No more than UCP's calls.
 *
 *   ucx_sender LIBUCP HEX-OF-ADDRESS COUNT */
#define _GNU_SOURCE
#include "dl/dl.h"
#include "ucx/api.h"
#include "ucx/ucx.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int fail(const char *what, int code) {
  fprintf(stderr, "ucx_sender: %s: %d\n", what, code);
  return 1;
}

static long long now(clockid_t c) {
  struct timespec t;
  clock_gettime(c, &t);
  return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

int main(int argc, char **argv) {
  char why[4096];
  if (argc != 4 || sluice_ucx_load(argv[1], why, sizeof why) != 0) {
    return fail(argc != 4 ? "arguments" : why, 2);
  }
  const struct ucx_api *f = sluice_ucx_api();
  size_t n = strlen(argv[2]) / 2, skip;
  unsigned char *blob = malloc(n + 1);
  for (size_t i = 0; i < n; i++) {
    sscanf(argv[2] + 2 * i, "%2hhx", &blob[i]);
  }
  skip = 9u + blob[8]; /* the head of ucx_agent.c, the name */
  unsigned char *address = malloc(n - skip);
  memcpy(address, blob + skip, n - skip);

  void *config = NULL, *context = NULL, *worker = NULL, *ep = NULL;
  struct ucx_params p;
  struct ucx_worker_params w;
  struct ucx_ep_params e;
  struct ucx_request_param how;
  memset(&p, 0, sizeof p), memset(&w, 0, sizeof w), memset(&e, 0, sizeof e), memset(&how, 0, sizeof how);
  p.field_mask = UCX_PARAM_FEATURES;
  p.features = UCX_FEATURE_AM | UCX_FEATURE_WAKEUP; /* as the other end: addresses tell of the features */
  w.field_mask = UCX_WORKER_THREAD_MODE;
  e.field_mask = UCX_EP_REMOTE_ADDRESS | UCX_EP_ERR_MODE;
  e.address = address;
  e.err_mode = UCX_ERR_MODE_PEER;
  how.op_attr_mask = UCX_OP_FLAGS;
  how.flags = UCX_AM_SEND_EAGER;
  int s;
  if ((s = f->config_read(NULL, NULL, &config)) != 0 || (s = f->init_version(UCX_API_MAJOR, UCX_API_MINOR, &p, config, &context)) != 0 ||
      (s = f->worker_create(context, &w, &worker)) != 0 || (s = f->ep_create(worker, &e, &ep)) != 0) {
    return fail("set-up", s);
  }
  long count = atol(argv[3]);
  long long next = now(CLOCK_MONOTONIC);
  for (long i = 0; i < count; i++) {
    char text[64];
    int len = snprintf(text, sizeof text, "%lld", now(CLOCK_REALTIME));
    void *r = f->am_send_nbx(ep, 7, "sender", 6, text, (size_t)len, &how);
    if (ucx_is_error(r)) {
      return fail("send", ucx_error_of(r));
    }
    while (r != NULL && f->request_check_status(r) == UCX_INPROGRESS) {
      f->worker_progress(worker);
    }
    if (r != NULL) {
      f->request_free(r);
    }
    f->worker_progress(worker);
    next += 1000000;
    long long left = next - now(CLOCK_MONOTONIC);
    if (left > 0) {
      nanosleep(&(struct timespec){0, (long)left}, NULL);
    }
  }
  how.flags = 0;
  void *r = f->ep_close_nbx(ep, &how); /* flushes */
  for (long long end = now(CLOCK_MONOTONIC) + 30000000000; r != NULL && !ucx_is_error(r) && f->request_check_status(r) == UCX_INPROGRESS && now(CLOCK_MONOTONIC) < end;) {
    f->worker_progress(worker);
  }
  return 0;
}
