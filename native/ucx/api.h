/* UCP as of API 1.13, declared by ourselves: what is used of it, nothing more.
 * Every struct that a caller fills begins with a mask of the fields that are
 * filled, so that a newer library takes the older, shorter struct. The layouts
 * are compared with UCX's own headers where those are installed
 * (testdata/test_ucx_layout.c). */
#ifndef SLUICE_UCX_API_H
#define SLUICE_UCX_API_H

#include <stddef.h>
#include <stdint.h>

#define UCX_API_MAJOR 1
#define UCX_API_MINOR 13

/* A packed enum in UCX: one signed byte, so the rest of the register is garbage. */
typedef int8_t ucx_status;
enum {
  UCX_OK = 0,
  UCX_INPROGRESS = 1,
  UCX_NO_MEMORY = -4,
  UCX_INVALID_PARAM = -5,
  UCX_BUSY = -15,
  UCX_CANCELED = -16,
  UCX_ERR_LAST = -100
};

/* A request, NULL, or an error code cast to a pointer. */
static inline int ucx_is_error(const void *p) { return (uintptr_t)p >= (uintptr_t)(intptr_t)UCX_ERR_LAST; }
static inline ucx_status ucx_error_of(const void *p) { return (ucx_status)(intptr_t)p; }

struct ucx_params {
  uint64_t field_mask;
  uint64_t features;
  size_t request_size;
  void *request_init, *request_cleanup;
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_num_eps, estimated_num_ppn;
  const char *name;
};
#define UCX_PARAM_FEATURES 1u
#define UCX_FEATURE_WAKEUP (1u << 4)
#define UCX_FEATURE_AM (1u << 6)

struct ucx_worker_params {
  uint64_t field_mask;
  int thread_mode;
  unsigned long cpu_mask[16];
  unsigned events;
  void *user_data;
  int event_fd;
  uint64_t flags;
  const char *name;
  size_t am_alignment;
  uint64_t client_id;
};
#define UCX_WORKER_THREAD_MODE 1u
#define UCX_THREAD_SINGLE 0

typedef void (*ucx_error_callback)(void *arg, void *ep, ucx_status status);
struct ucx_ep_params {
  uint64_t field_mask;
  const void *address;
  int err_mode;
  struct {
    ucx_error_callback cb;
    void *arg;
  } err_handler;
  void *user_data;
  unsigned flags;
  struct {
    const void *addr;
    uint32_t addrlen;
  } sockaddr;
  void *conn_request;
  const char *name;
  struct {
    const void *addr;
    uint32_t addrlen;
  } local_sockaddr;
};
#define UCX_EP_REMOTE_ADDRESS 1u
#define UCX_EP_ERR_MODE 2u
#define UCX_EP_ERR_HANDLER 4u
#define UCX_ERR_MODE_PEER 1

struct ucx_am_recv {
  uint64_t recv_attr;
  void *reply_ep;
};
#define UCX_AM_RECV_RNDV (1u << 17)
typedef ucx_status (*ucx_am_callback)(void *arg, const void *header, size_t header_len, void *data, size_t len,
                                      const struct ucx_am_recv *param);
struct ucx_am_handler {
  uint64_t field_mask;
  unsigned id;
  uint32_t flags;
  ucx_am_callback cb;
  void *arg;
};
#define UCX_AM_HANDLER_ID 1u
#define UCX_AM_HANDLER_CB 4u
#define UCX_AM_HANDLER_ARG 8u

struct ucx_request_param {
  uint32_t op_attr_mask;
  uint32_t flags;
  void *request;
  void (*send)(void *request, ucx_status status, void *user_data);
  uint64_t datatype;
  void *user_data;
  void *reply_buffer;
  int memory_type;
  void *recv_info;
  void *memh;
};
#define UCX_OP_CALLBACK (1u << 1)
#define UCX_OP_USER_DATA (1u << 2)
#define UCX_OP_FLAGS (1u << 4)
#define UCX_AM_SEND_EAGER 2u
#define UCX_EP_CLOSE_FORCE 1u

/* result, name, arguments; all are required. */
#define UCX_REQUIRED(X)                                                                                            \
  X(void, get_version, (unsigned *, unsigned *, unsigned *))                                                       \
  X(ucx_status, config_read, (const char *, const char *, void **))                                                \
  X(ucx_status, config_modify, (void *, const char *, const char *))                                               \
  X(void, config_release, (void *))                                                                                \
  X(ucx_status, init_version, (unsigned, unsigned, const struct ucx_params *, const void *, void **))              \
  X(void, cleanup, (void *))                                                                                       \
  X(ucx_status, worker_create, (void *, const struct ucx_worker_params *, void **))                                \
  X(void, worker_destroy, (void *))                                                                                \
  X(ucx_status, worker_get_address, (void *, void **, size_t *))                                                   \
  X(void, worker_release_address, (void *, void *))                                                                \
  X(ucx_status, worker_get_efd, (void *, int *))                                                                   \
  X(ucx_status, worker_arm, (void *))                                                                              \
  X(unsigned, worker_progress, (void *))                                                                           \
  X(ucx_status, worker_set_am_recv_handler, (void *, const struct ucx_am_handler *))                               \
  X(ucx_status, ep_create, (void *, const struct ucx_ep_params *, void **))                                        \
  X(void *, ep_close_nbx, (void *, const struct ucx_request_param *))                                              \
  X(void *, am_send_nbx, (void *, unsigned, const void *, size_t, const void *, size_t, const struct ucx_request_param *)) \
  X(ucx_status, request_check_status, (void *))                                                                    \
  X(void, request_free, (void *))

struct ucx_api {
#define X(result, name, args) result(*name) args;
  UCX_REQUIRED(X)
#undef X
  unsigned major, minor, patch;
};

/* The loaded library; NULL before sluice_ucx_load has answered OK. */
const struct ucx_api *sluice_ucx_api(void);

#endif
