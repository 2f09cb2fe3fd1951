/* Our declarations of UCP beside UCX's own header (Debian: libucx-dev), which is
 * where this is built at all. */
#include "harness.h"
#include "ucx/api.h"

#include <ucp/api/ucp.h>

#define SAME(ours, our_field, theirs, their_field)                                                                   \
  CHECK(offsetof(struct ours, our_field) == offsetof(theirs, their_field) &&                                         \
            sizeof(((struct ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),                             \
        "%s.%s lies at %zu, UCX's at %zu", #ours, #our_field, offsetof(struct ours, our_field), offsetof(theirs, their_field))

int main(void) {
  SAME(ucx_params, field_mask, ucp_params_t, field_mask);
  SAME(ucx_params, features, ucp_params_t, features);
  SAME(ucx_params, request_init, ucp_params_t, request_init);
  SAME(ucx_params, name, ucp_params_t, name);
  SAME(ucx_worker_params, thread_mode, ucp_worker_params_t, thread_mode);
  SAME(ucx_worker_params, cpu_mask, ucp_worker_params_t, cpu_mask);
  SAME(ucx_worker_params, event_fd, ucp_worker_params_t, event_fd);
  SAME(ucx_worker_params, client_id, ucp_worker_params_t, client_id);
  SAME(ucx_ep_params, address, ucp_ep_params_t, address);
  SAME(ucx_ep_params, err_mode, ucp_ep_params_t, err_mode);
  SAME(ucx_ep_params, err_handler, ucp_ep_params_t, err_handler);
  SAME(ucx_ep_params, user_data, ucp_ep_params_t, user_data);
  SAME(ucx_ep_params, conn_request, ucp_ep_params_t, conn_request);
  SAME(ucx_ep_params, local_sockaddr, ucp_ep_params_t, local_sockaddr);
  SAME(ucx_am_recv, recv_attr, ucp_am_recv_param_t, recv_attr);
  SAME(ucx_am_recv, reply_ep, ucp_am_recv_param_t, reply_ep);
  SAME(ucx_am_handler, id, ucp_am_handler_param_t, id);
  SAME(ucx_am_handler, cb, ucp_am_handler_param_t, cb);
  SAME(ucx_am_handler, arg, ucp_am_handler_param_t, arg);
  SAME(ucx_request_param, flags, ucp_request_param_t, flags);
  SAME(ucx_request_param, request, ucp_request_param_t, request);
  SAME(ucx_request_param, send, ucp_request_param_t, cb);
  SAME(ucx_request_param, user_data, ucp_request_param_t, user_data);
  SAME(ucx_request_param, memory_type, ucp_request_param_t, memory_type);
  SAME(ucx_request_param, memh, ucp_request_param_t, memh);
  CHECK(sizeof(ucx_status) == sizeof(ucs_status_t), "the status has %zu bytes", sizeof(ucs_status_t));
  static const struct {
    const char *name;
    long ours, theirs;
  } values[] = {
      {"features", UCX_PARAM_FEATURES, UCP_PARAM_FIELD_FEATURES},
      {"wakeup", UCX_FEATURE_WAKEUP, UCP_FEATURE_WAKEUP},
      {"am", UCX_FEATURE_AM, UCP_FEATURE_AM},
      {"thread mode", UCX_WORKER_THREAD_MODE, UCP_WORKER_PARAM_FIELD_THREAD_MODE},
      {"single", UCX_THREAD_SINGLE, UCS_THREAD_MODE_SINGLE},
      {"address", UCX_EP_REMOTE_ADDRESS, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS},
      {"error mode", UCX_EP_ERR_MODE, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE},
      {"error handler", UCX_EP_ERR_HANDLER, UCP_EP_PARAM_FIELD_ERR_HANDLER},
      {"peer", UCX_ERR_MODE_PEER, UCP_ERR_HANDLING_MODE_PEER},
      {"rendezvous", UCX_AM_RECV_RNDV, UCP_AM_RECV_ATTR_FLAG_RNDV},
      {"handler id", UCX_AM_HANDLER_ID, UCP_AM_HANDLER_PARAM_FIELD_ID},
      {"handler cb", UCX_AM_HANDLER_CB, UCP_AM_HANDLER_PARAM_FIELD_CB},
      {"handler arg", UCX_AM_HANDLER_ARG, UCP_AM_HANDLER_PARAM_FIELD_ARG},
      {"callback", UCX_OP_CALLBACK, UCP_OP_ATTR_FIELD_CALLBACK},
      {"user data", UCX_OP_USER_DATA, UCP_OP_ATTR_FIELD_USER_DATA},
      {"flags", UCX_OP_FLAGS, UCP_OP_ATTR_FIELD_FLAGS},
      {"eager", UCX_AM_SEND_EAGER, UCP_AM_SEND_FLAG_EAGER},
      {"force", UCX_EP_CLOSE_FORCE, UCP_EP_CLOSE_FLAG_FORCE},
      {"busy", UCX_BUSY, UCS_ERR_BUSY},
      {"canceled", UCX_CANCELED, UCS_ERR_CANCELED},
      {"last", UCX_ERR_LAST, UCS_ERR_LAST},
      {"no memory", UCX_NO_MEMORY, UCS_ERR_NO_MEMORY},
      {"invalid", UCX_INVALID_PARAM, UCS_ERR_INVALID_PARAM},
  };
  for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
    CHECK(values[i].ours == values[i].theirs, "%s is %ld, UCX's %ld", values[i].name, values[i].ours, values[i].theirs);
  }
  return done();
}
