/* Calls the real libsluice_tokenizer through its C ABI from several threads. The argument
 * is the library; without the file there is nothing to test. */
#define _GNU_SOURCE
#include "dl/dl.h"
#include "tokenizer/loader.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int checks, failures;

#define CHECK(ok, ...)                                     \
  do {                                                     \
    __atomic_fetch_add(&checks, 1, __ATOMIC_RELAXED);      \
    if (!(ok)) {                                           \
      __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);  \
      fprintf(stderr, "FAIL %s:%d: ", __FILE__, __LINE__); \
      fprintf(stderr, __VA_ARGS__);                        \
      fputc('\n', stderr);                                 \
    }                                                      \
  } while (0)

static const uint8_t *bytes(const char *s) { return (const uint8_t *)s; }

static int is(const struct sluice_tok_result *r, const char *want) {
  return r->len == strlen(want) && memcmp(r->data, want, r->len) == 0;
}

/* Renders and expects a code, and for SLUICE_TOK_OK a text. */
static void render(struct sluice_tok_model *m, const char *template_text, const char *input, int code, const char *want) {
  struct sluice_tok_result r;
  int got = sluice_tokenizer_render(m, bytes(template_text), strlen(template_text), bytes(input), strlen(input), 0, &r);
  CHECK(got == code, "%s gives %d, want %d: %.*s", template_text, got, code, (int)r.len, (const char *)r.data);
  CHECK(code != SLUICE_TOK_OK || is(&r, want), "%s gives %.*s, want %s", template_text, (int)r.len, (const char *)r.data, want);
  sluice_tokenizer_free(&r);
  CHECK(r.data == NULL && r.len == 0, "a freed result is empty");
  sluice_tokenizer_free(&r);
}

static void encode(struct sluice_tok_model *m, size_t cap) {
  struct sluice_tok_result r;
  uint32_t ids[16];
  static const uint32_t want[] = {256, 'a', 0xc3, 0xa9, 257};
  int code = sluice_tokenizer_encode(m, bytes("a\xc3\xa9<|end|>"), 10, SLUICE_TOK_ADD_SPECIAL | SLUICE_TOK_ADMIT, cap > 0 ? ids : NULL, cap, &r);
  CHECK(code == SLUICE_TOK_OK && r.len == 5, "encode gives %d, %zu ids", code, r.len);
  CHECK((r.data == NULL) == (cap >= 5), "the ids go to the array if they fit");
  CHECK(memcmp(r.data != NULL ? r.data : ids, want, sizeof want) == 0, "wrong ids");
  sluice_tokenizer_free(&r);
  CHECK(sluice_tokenizer_encode(m, bytes("\xff"), 1, 0, ids, 16, &r) == SLUICE_TOK_INPUT, "malformed UTF-8 is refused");
  sluice_tokenizer_free(&r);
  CHECK(sluice_tokenizer_encode(m, NULL, 0, 0, NULL, 0, &r) == SLUICE_TOK_OK && r.len == 0, "an empty text has no ids");
  sluice_tokenizer_free(&r);
  CHECK(sluice_tokenizer_encode(m, NULL, 0, 99, NULL, 0, &r) == SLUICE_TOK_ARGUMENT, "unknown flags are refused");
  sluice_tokenizer_free(&r);
}

static void *use(void *p) {
  struct sluice_tok_model *m = p;
  static const char chat[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"add_generation_prompt\":true}";
  for (int i = 0; i < 20; i++) {
    render(m, "", chat, SLUICE_TOK_OK, "<|begin|>user: hi<|end|>\nassistant:");
    render(m, "{{ messages | tojson }}", chat, SLUICE_TOK_OK, "[{\"role\": \"user\", \"content\": \"hi\"}]");
    render(m, "{{ raise_exception('x') }}", chat, SLUICE_TOK_REFUSED, NULL);
    render(m, "{% for", chat, SLUICE_TOK_TEMPLATE, NULL);
    render(m, "", "{", SLUICE_TOK_INPUT, NULL);
    encode(m, i % 16);
  }
  struct sluice_tok_result r;
  for (uint32_t what = 0; what < 4; what++) {
    CHECK((sluice_tokenizer_info(m, what, &r) == SLUICE_TOK_OK) == (what < 3), "information %u", what);
    sluice_tokenizer_free(&r);
  }
  return NULL;
}

int main(int argc, char **argv) {
  char why[4096];
  if (argc < 3 || access(argv[1], F_OK) != 0) {
    printf("no library: make build builds it where cargo is installed\n");
    return 77;
  }
  CHECK(sluice_tokenizer_load("/no/such/libsluice_tokenizer.so", why, sizeof why) == SLUICE_LOAD_ABSENT, "absent: %s", why);
  CHECK(sluice_tokenizer_load("", why, sizeof why) == SLUICE_LOAD_BROKEN, "an empty path is refused");
  int code = sluice_tokenizer_load(argv[1], why, sizeof why);
  CHECK(code == SLUICE_LOAD_OK, "load: %s", why);
  if (code != SLUICE_LOAD_OK) {
    return 1;
  }
  CHECK(sluice_tokenizer_load(argv[1], why, sizeof why) == SLUICE_LOAD_OK, "a second load: %s", why);
  struct sluice_tok_result r;
  struct sluice_tok_model *m = NULL;
  struct sluice_tok_options options = {sizeof options, 0, 0, 0};
  CHECK(sluice_tokenizer_open_model("/no/such/folder", &options, &m, &r) == SLUICE_TOK_NOT_FOUND && m == NULL, "no folder");
  sluice_tokenizer_free(&r);
  options.size = 1;
  CHECK(sluice_tokenizer_open_model(argv[2], &options, &m, &r) == SLUICE_TOK_ARGUMENT && m == NULL, "options of another ABI");
  sluice_tokenizer_free(&r);
  CHECK(sluice_tokenizer_info(NULL, 0, &r) == SLUICE_TOK_ARGUMENT, "no model");
  sluice_tokenizer_free(&r);
  CHECK(sluice_tokenizer_open_model(argv[2], NULL, &m, &r) == SLUICE_TOK_OK, "load: %.*s", (int)r.len, (const char *)r.data);
  pthread_t t[4];
  for (int i = 0; i < 4; i++) {
    pthread_create(&t[i], NULL, use, m);
  }
  for (int i = 0; i < 4; i++) {
    pthread_join(t[i], NULL);
  }
  sluice_tokenizer_close_model(m);
  sluice_tokenizer_close_model(NULL);
  printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}
