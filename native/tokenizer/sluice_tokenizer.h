/* The C ABI of libsluice_tokenizer: chat templates and tokenizers of language
 * models. The library is written in Rust (src/) over Hugging Face's tokenizers and
 * minijinja. Sluice opens it at run time and runs without it where it is absent.
 *
 * Every function may be called from any thread, and any number of them at once with
 * one model, except sluice_tok_close, which no other call of that model may overlap.
 * None calls back, keeps a pointer of the caller, or lets a panic out. They compute:
 * a call takes time in proportion to its input, so none belongs on an event loop.
 *
 * A function that returns a code fills *out in every case. After SLUICE_TOK_OK it is
 * the result; after another code it is the text of the error, in UTF-8. The caller
 * passes it to sluice_tok_free when done. Texts have a length and no final NUL. */
#ifndef SLUICE_TOKENIZER_H
#define SLUICE_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

/* The version of this ABI. Every incompatible change increments it. */
#define SLUICE_TOK_ABI 2

enum sluice_tok_code {
  SLUICE_TOK_OK = 0,
  SLUICE_TOK_ARGUMENT = 1,    /* a mistake of the caller: a null pointer, an unknown number */
  SLUICE_TOK_NOT_FOUND = 2,   /* the folder or a file cannot be read */
  SLUICE_TOK_UNSUPPORTED = 3, /* the files are not ones that the library understands */
  SLUICE_TOK_INPUT = 4,       /* not UTF-8, not JSON, or not a request */
  SLUICE_TOK_TEMPLATE = 5,    /* the template failed; the text can quote the request, so it may go to
                               * the client but not to a log */
  SLUICE_TOK_LIMIT = 6,       /* the input, the text or the template's steps exceed a bound */
  SLUICE_TOK_DEADLINE = 7,    /* the time was over */
  SLUICE_TOK_PANIC = 8,       /* a defect of the library; the model can still be used */
  SLUICE_TOK_THREAD = 9,      /* this thread may not encode, see SLUICE_TOK_ADMIT */
  SLUICE_TOK_REFUSED = 10     /* the template called raise_exception, or the text lacks the message to
                               * continue: an engine refuses the request too. The text as with
                               * SLUICE_TOK_TEMPLATE */
};

/* A loaded model. */
struct sluice_tok_model;

/* A result or the text of an error. */
struct sluice_tok_result {
  void *data;  /* memory of the library, or NULL */
  size_t len;  /* bytes of a text; ids of an encoding */
  size_t size; /* private: bytes at data */
};

/* The bounds of a model; 0 is the default. */
struct sluice_tok_options {
  size_t size;         /* sizeof(struct sluice_tok_options) */
  uint64_t max_input;  /* bytes of a request or a text (32 MiB) */
  uint64_t max_output; /* bytes of a rendered text (64 MiB) */
  uint64_t flags;      /* SLUICE_TOK_REFERENCE or 0 */
};

/* Encode with Hugging Face's tokenizers, although fastokens, which is faster, gives the
 * same ids for the probes that loading compares. For tests and measurements. */
#define SLUICE_TOK_REFERENCE 1

#define SLUICE_TOK_ADD_SPECIAL 1
#define SLUICE_TOK_ADMIT 2

/* The ABI of the library: SLUICE_TOK_ABI of the header that it was built with. */
uint32_t sluice_tok_abi_version(void);

/* The version of the library and of what it is made of, for people. Static. */
const char *sluice_tok_version(void);

/* Releases the memory of a result and empties it. NULL and an empty result are fine. */
void sluice_tok_free(struct sluice_tok_result *r);

/* Loads the model in a folder: tokenizer.json, and where they exist
 * tokenizer_config.json, chat_template.jinja, additional_chat_templates/NAME.jinja and
 * generation_config.json. Without tokenizer.json: tekken.json, tiktoken.model of Kimi, or
 * qwen.tiktoken; a folder with consolidated*.safetensors and tekken.json is read as
 * mistral-common does in any case, and has no template. options may be NULL. *model is NULL
 * after an error. */
int sluice_tok_load(const char *dir, const struct sluice_tok_options *options,
                    struct sluice_tok_model **model, struct sluice_tok_result *out);

/* Releases a model; NULL is fine. */
void sluice_tok_close(struct sluice_tok_model *model);

/* Describes a model in JSON.
 * what 0: an object with kind ("bpe", "unigram", "wordpiece", "wordlevel"), vocab_size,
 *   bos_id, eos_id, eos_ids (of generation_config.json), added_ids (what an encoding of
 *   "" with special tokens gives), encoder ("fastokens" or "tokenizers"), format
 *   ("tokenizer.json", "tekken" or "tiktoken"), templates (the
 *   names of those that can be rendered), tokenizer_class,
 *   model_max_length.
 * what 1: a list of the added tokens: id, content, special, normalized, lstrip, rstrip,
 *   single_word, as in tokenizer.json, in the order of their ids.
 * what 2: the tokenizer.json that another file was converted to, without its vocabulary
 *   and merges; null if the folder has its own. */
int sluice_tok_info(const struct sluice_tok_model *model, uint32_t what, struct sluice_tok_result *out);

/* Renders a request as apply_chat_template of transformers does. The model's own template
 * is tool_use for a request with tools, if there is one, else default. If that one cannot
 * be rendered the code is SLUICE_TOK_UNSUPPORTED; no other is rendered in its place.
 * template: the name of one of the model's templates, the source of another one, or
 *   empty for the model's own.
 * input: a JSON object with messages, and optionally tools, documents,
 *   add_generation_prompt, continue_final_message (true or the name of a field),
 *   chat_template_kwargs, and now (seconds since 1970, the time of strftime_now). Other
 *   members are errors.
 * timeout_ns: the time after which the template is stopped: at its next output, step of a
 *   loop, filter or method; 0 for none. Its steps, and the depth and size of its expressions
 *   and values, are bounded in any case, so that the stack does not overflow. */
int sluice_tok_render(const struct sluice_tok_model *model, const uint8_t *template_text, size_t template_len,
                      const uint8_t *input, size_t input_len, uint64_t timeout_ns,
                      struct sluice_tok_result *out);

/* Encodes a text. The ids go to dst if dst_cap of them suffice, and out->data is then
 * NULL; else to out->data. out->len is their number.
 * flags: SLUICE_TOK_ADD_SPECIAL, for the special tokens that the post-processor adds, and
 *   SLUICE_TOK_ADMIT. The encoder keeps words in memory of the thread, some tens of MiB at
 *   most, so sixteen threads may encode; another gets SLUICE_TOK_THREAD unless it has
 *   SLUICE_TOK_ADMIT. A thread that ends makes room. */
int sluice_tok_encode(const struct sluice_tok_model *model, const uint8_t *text, size_t text_len, uint32_t flags,
                      uint32_t *dst, size_t dst_cap, struct sluice_tok_result *out);

#endif
