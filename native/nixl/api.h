/* NIXL's C API, as our own prototypes: read from src/bindings/rust/wrapper.h of
 * NIXL 1.5.2 (unchanged for what is used here since 0.10.1). Handles are opaque
 * pointers, enums are int. Nothing of NIXL's headers is needed to build. */
#ifndef SLUICE_NIXL_API_H
#define SLUICE_NIXL_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* nixl_capi_agent_config_t, followed by zeros: a library whose struct has grown
 * at its end reads "off" there, not our stack. */
struct nixl_config {
  bool enable_prog_thread;
  bool enable_listen_thread;
  int listen_port;
  int thread_sync;
  unsigned int num_workers;
  uint64_t pthr_delay_us;
  uint64_t lthr_delay_us;
  bool capture_telemetry;
  uint64_t room[16];
};

#define NIXL_SYNC_STRICT 1

struct nixl_telemetry {
  uint64_t start_time_us;
  uint64_t post_duration_us;
  uint64_t xfer_duration_us;
  uint64_t total_bytes;
  uint64_t desc_count;
  uint64_t room[8];
};

/* X(result, name without prefix, arguments) */
#define NIXL_REQUIRED(X)                                                                            \
  X(int, create_configured_agent, (const char *, const struct nixl_config *, void **))              \
  X(int, destroy_agent, (void *))                                                                   \
  X(int, get_local_md, (void *, void **, size_t *))                                                 \
  X(int, load_remote_md, (void *, const void *, size_t, char **))                                   \
  X(int, invalidate_remote_md, (void *, const char *))                                              \
  X(int, get_available_plugins, (void *, void **))                                                  \
  X(int, destroy_string_list, (void *))                                                             \
  X(int, string_list_size, (void *, size_t *))                                                      \
  X(int, string_list_get, (void *, size_t, const char **))                                          \
  X(int, get_plugin_params, (void *, const char *, void **, void **))                               \
  X(int, destroy_mem_list, (void *))                                                                \
  X(int, destroy_params, (void *))                                                                  \
  X(int, create_backend, (void *, const char *, void *, void **))                                   \
  X(int, destroy_backend, (void *))                                                                 \
  X(int, create_opt_args, (void **))                                                                \
  X(int, destroy_opt_args, (void *))                                                                \
  X(int, opt_args_add_backend, (void *, void *))                                                    \
  X(int, opt_args_set_notif_msg, (void *, const void *, size_t))                                    \
  X(int, opt_args_set_has_notif, (void *, bool))                                                    \
  X(int, params_add, (void *, const char *, const char *))                                          \
  X(int, create_reg_dlist, (int, void **))                                                          \
  X(int, destroy_reg_dlist, (void *))                                                               \
  X(int, reg_dlist_add_desc, (void *, uintptr_t, size_t, uint64_t, const void *, size_t))           \
  X(int, register_mem, (void *, void *, void *))                                                    \
  X(int, deregister_mem, (void *, void *, void *))                                                  \
  X(int, create_xfer_dlist, (int, void **))                                                         \
  X(int, destroy_xfer_dlist, (void *))                                                              \
  X(int, xfer_dlist_add_desc, (void *, uintptr_t, size_t, uint64_t))                                \
  X(int, create_xfer_req, (void *, int, void *, void *, const char *, void **, void *))             \
  X(int, post_xfer_req, (void *, void *, void *))                                                   \
  X(int, get_xfer_status, (void *, void *))                                                         \
  X(int, release_xfer_req, (void *, void *))                                                        \
  X(int, destroy_xfer_req, (void *))                                                                \
  X(int, create_notif_map, (void **))                                                               \
  X(int, destroy_notif_map, (void *))                                                               \
  X(int, get_notifs, (void *, void *, void *))                                                      \
  X(int, notif_map_size, (void *, size_t *))                                                        \
  X(int, notif_map_get_agent_at, (void *, size_t, const char **))                                   \
  X(int, notif_map_get_notifs_size, (void *, const char *, size_t *))                               \
  X(int, notif_map_get_notif, (void *, const char *, size_t, const void **, size_t *))              \
  X(int, notif_map_clear, (void *))                                                                 \
  X(int, gen_notif, (void *, const char *, const void *, size_t, void *))

#define NIXL_OPTIONAL(X)                                                                            \
  X(bool, is_stub, (void))                                                                          \
  X(void, mem_free, (void *))                                                                       \
  X(int, create_params, (void **))                                                                  \
  X(int, check_remote_md, (void *, const char *, void *))                                           \
  X(int, agent_make_connection, (void *, const char *, void *))                                     \
  X(int, get_backend_params, (void *, void *, void **, void **))                                    \
  X(int, params_create_iterator, (void *, void **))                                                 \
  X(int, params_iterator_next, (void *, const char **, const char **, bool *))                      \
  X(int, params_destroy_iterator, (void *))                                                         \
  X(int, params_is_empty, (void *, bool *))                                                         \
  X(int, get_xfer_telemetry, (void *, void *, struct nixl_telemetry *))

struct nixl_api {
#define X(result, name, args) result(*name) args;
  NIXL_REQUIRED(X)
  NIXL_OPTIONAL(X)
#undef X
};

/* The table of the loaded library; NULL before a load succeeded. */
const struct nixl_api *sluice_nixl_api(void);

#endif
