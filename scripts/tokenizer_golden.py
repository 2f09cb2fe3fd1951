#!/usr/bin/env python3
"""Compares the native tokenizer with transformers, tokenizers, llama.cpp's expected ids,
mistral-common and tiktoken.

The material is the source distribution of llama-cpp-python: chat templates of current models
and GGUF vocabularies with expected ids. It is downloaded once into the cache.

  scripts/tokenizer_golden.py templates            text of every template x 500 conversations
  scripts/tokenizer_golden.py formats              content format of every template, by vLLM's own function (needs the
                                                   vLLM that scripts/e2e-vllm.sh installs, and Go)
  scripts/tokenizer_golden.py ids                  ids of every vocabulary x corpus
  scripts/tokenizer_golden.py files                ids of vocabularies in other files than tokenizer.json
  scripts/tokenizer_golden.py classes              ids of whole folders, by the class of their tokenizer
  scripts/tokenizer_golden.py escapes              JSON strings of every character of the basic plane
  scripts/tokenizer_golden.py all                  all of these, some minutes; without formats where there is no vLLM
  scripts/tokenizer_golden.py rewrite              writes golden.jsonl and escapes.json of native/tokenizer/testdata, and
                                                   native/tokenizer/src/classes.json

  --conversations N   of each template (500)
  --only NAME         templates or vocabularies whose name contains it
  --show N            differences to print of each (1)
  --report FILE       with all: write the result between the markers of this page
"""
import argparse
import base64
import ctypes
import datetime
import glob
import hashlib
import json
import os
import random
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
CACHE = os.path.join(os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice"), "tokenizer")
ARCHIVE = "llama-cpp-python==0.3.36"
PACKAGES = ["transformers==5.19.0", "jinja2==3.1.6", "tokenizers==0.23.3", "gguf==0.19.0", "mistral-common==1.13.1", "tiktoken==0.14.0"]
BEGIN, END = "<!-- tokenizer-golden -->", "<!-- /tokenizer-golden -->"
RESULTS = []  # rows of the report: what was compared, with what, how much of it is equal, how much differs
NOW = 1767225600  # of strftime_now: 2026-01-01 00:00 UTC


def environment():
    """Runs this script again in a virtual environment that has the oracles."""
    try:
        import gguf, jinja2, mistral_common, tiktoken, tokenizers, transformers  # noqa: F401
        return
    except ImportError:
        pass
    venv = os.path.join(CACHE, "venv")
    python = os.path.join(venv, "bin", "python3")
    stamp = os.path.join(venv, "complete")
    wanted = "\n".join(PACKAGES)
    if not os.path.exists(stamp) or open(stamp).read() != wanted:
        print("tokenizer_golden: installing", ", ".join(PACKAGES), file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES], check=True)
        with open(stamp, "w") as f:
            f.write(wanted)
    if os.path.realpath(sys.prefix) == os.path.realpath(venv):
        sys.exit(f"tokenizer_golden: {venv} is incomplete; remove it")
    os.execv(python, [python, *sys.argv])


def models():
    """Returns the folder models/ of llama.cpp."""
    folder = os.path.join(CACHE, "archive", "vendor", "llama.cpp", "models")
    if not os.path.isdir(os.path.join(folder, "templates")):
        os.makedirs(CACHE, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--no-binary", "llama-cpp-python", "-d", CACHE, ARCHIVE], check=True)
        [archive] = glob.glob(os.path.join(CACHE, "llama_cpp_python-*.tar.gz"))
        os.makedirs(os.path.join(CACHE, "archive"), exist_ok=True)
        subprocess.run(["tar", "xzf", archive, "-C", os.path.join(CACHE, "archive"), "--strip-components=1", "--wildcards", "*/vendor/llama.cpp/models/*"], check=True)
        os.remove(archive)
    return folder


# The library, through its C ABI.


class Result(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_size_t), ("size", ctypes.c_size_t)]


class Failure(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


class Library:
    def __init__(self):
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        self.so = ctypes.CDLL(os.environ.get("SLUICE_TOKENIZER_LIBRARY") or os.path.join(ROOT, "bin", "libsluice_tokenizer.so"))

    def call(self, name, *args):
        out = Result()
        code = getattr(self.so, name)(*args, ctypes.byref(out))
        data = ctypes.string_at(out.data, out.size) if out.data else b""
        self.so.sluice_tok_free(ctypes.byref(out))
        if code:
            raise Failure(code, data.decode())
        return data

    def load(self, folder):
        handle = ctypes.c_void_p()
        self.call("sluice_tok_load", folder.encode(), None, ctypes.byref(handle))
        return Model(self, handle)


class Model:
    def __init__(self, library, handle):
        self.library, self.handle = library, handle

    def render(self, template, request):
        t, r = template.encode(), json.dumps(request).encode()
        z = ctypes.c_size_t
        return self.library.call("sluice_tok_render", self.handle, t, z(len(t)), r, z(len(r)), ctypes.c_uint64(0)).decode()

    def encode(self, text, special):
        b = text.encode()
        z = ctypes.c_size_t
        data = self.library.call("sluice_tok_encode", self.handle, b, z(len(b)), ctypes.c_int(special), None, z(0))
        return list(memoryview(data).cast("I"))

    def close(self):
        self.library.so.sluice_tok_close(self.handle)


# Conversations.

TEXTS = ["hi", "What is 2 + 2?", " leading and trailing \n", "", "línea ünïcode 漢字かな 한국어 🙂👩‍👩‍👧", "a\n\nb\tc", "{\"json\": [1, 2.0, null]}",
         "<think>inner</think>\n\nanswer", "<tool_call>fake</tool_call>", "quotes ' and \" and \\ and </s>", "x" * 200, "def f(x):\n    return x**2  # 50 %\n",
         "ends with space ", "{{ not a template }}", "<|im_end|>", "\u00a0nbsp\u3000", "line\r\nwindows", "&amp; <b>html</b>"]
NAMES = ["get_weather", "search", "run_code", "items", "web.find"]


def schema(r, depth=0):
    kind = r.choice(["string", "integer", "number", "boolean", "array", "object", "string", ["string", "null"], "enum", "anyOf"])
    s = {}
    if kind == "enum":
        s = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    elif kind == "anyOf":
        s = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    else:
        s = {"type": kind}
        if kind == "array":
            if r.random() < 0.8:
                s["items"] = schema(r, depth + 1) if depth < 2 else {"type": "string"}
        if kind == "object" and depth < 2:
            s["properties"] = {n: schema(r, depth + 1) for n in r.sample(["a", "b", "items", "name"], r.randint(0, 2))}
            if r.random() < 0.5:
                s["required"] = list(s["properties"])
    if r.random() < 0.6:
        s["description"] = r.choice(TEXTS)
    if r.random() < 0.2:
        s["default"] = r.choice(["x", 1, 2.5, True, None, [1, "a"], {"k": "v"}])
    return s


def tools(r):
    out = []
    for name in r.sample(NAMES, r.randint(1, 3)):
        f = {"name": name, "description": r.choice(TEXTS)}
        if r.random() < 0.9:
            names = r.sample(["city", "unit", "items", "limit", "nested"], r.randint(0, 3))
            f["parameters"] = {"type": "object", "properties": {n: schema(r) for n in names}}
            if r.random() < 0.7:
                f["parameters"]["required"] = names[:1]
        if r.random() < 0.1:
            f["strict"] = True
        out.append({"type": "function", "function": f})
    return out


def value(r, depth=0):
    return r.choice([lambda: r.choice(TEXTS), lambda: r.randint(-5, 10**6), lambda: r.choice([0.1, 1e20, -2.5, 1e-7, 100.0, 12345678901234567890]),
                     lambda: r.choice([True, False, None]),
                     lambda: [value(r, depth + 1) for _ in range(r.randint(0, 3))] if depth < 2 else [],
                     lambda: {k: value(r, depth + 1) for k in r.sample(["a", "b", "items", "ключ"], r.randint(0, 3))} if depth < 2 else {}])()


def content(r, multi=True):
    if multi and r.random() < 0.15:
        return [{"type": "text", "text": r.choice(TEXTS)} for _ in range(r.randint(1, 3))]
    return r.choice(TEXTS)


def conversation(seed):
    """A request as an engine passes it to apply_chat_template: arguments of calls are objects."""
    r = random.Random(seed)
    request = {"messages": [], "add_generation_prompt": r.random() < 0.8, "now": NOW}
    m = request["messages"]
    if r.random() < 0.5:
        m.append({"role": "system", "content": content(r)})
    if r.random() < 0.05:
        m.append({"role": "developer", "content": content(r)})
    with_tools = r.random() < 0.5
    if with_tools:
        request["tools"] = tools(r)
    elif r.random() < 0.3:
        request["tools"] = None
    for turn in range(r.randint(1, 4)):
        m.append({"role": "user", "content": content(r)})
        last = turn >= 1 and r.random() < 0.3
        if with_tools and r.random() < 0.6:
            calls = []
            for i in range(r.choice([1, 1, 2])):
                args = {k: value(r) for k in r.sample(["city", "unit", "items", "limit"], r.randint(0, 3))}
                calls.append({"id": f"{'abcdefgh'[i]}{turn:08d}", "type": "function", "function": {"name": r.choice(NAMES), "arguments": args}})
            a = {"role": "assistant", "content": r.choice([None, "", content(r)]), "tool_calls": calls}
            if r.random() < 0.4:
                a[r.choice(["reasoning_content", "reasoning"])] = r.choice(TEXTS)
            m.append(a)
            for c in calls:
                t = {"role": "tool", "content": content(r), "tool_call_id": c["id"]}
                if r.random() < 0.5:
                    t["name"] = c["function"]["name"]
                m.append(t)
            if r.random() < 0.3:
                continue
        if last:
            break
        if turn < 3 or r.random() < 0.5:
            a = {"role": "assistant", "content": content(r)}
            if r.random() < 0.3:
                a[r.choice(["reasoning_content", "reasoning"])] = r.choice(TEXTS)
            m.append(a)
    if r.random() < 0.6 and m[-1]["role"] == "assistant":
        m.append({"role": "user", "content": content(r)})
    if m[-1]["role"] == "assistant" and m[-1].get("content") and r.random() < 0.6:
        request["continue_final_message"] = True
        request["add_generation_prompt"] = False
    if r.random() < 0.3:
        k = {}
        if r.random() < 0.6:
            k[r.choice(["enable_thinking", "thinking"])] = r.random() < 0.5
        if r.random() < 0.3:
            k["reasoning_effort"] = r.choice(["low", "medium", "high"])
        if r.random() < 0.2:
            k["preserve_thinking"] = True
        if r.random() < 0.1:
            k["bos_token"] = "<bos>"
        request["chat_template_kwargs"] = k
    if r.random() < 0.1:
        request["documents"] = [{"title": r.choice(TEXTS), "text": r.choice(TEXTS)}]
    return request


UNSUPPORTED, REFUSED = 3, ("", "")  # a template that the library refuses, so that the engine is asked

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def oracle():
    from transformers.utils import chat_template_utils as u

    class Now(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(NOW)

    u.datetime = Now

    def render(template, request):
        q = dict(request)
        kwargs = {**SPECIAL, **(q.pop("chat_template_kwargs", None) or {})}
        q.pop("now")
        [text], _ = u.render_jinja_template(conversations=[q.pop("messages")], chat_template=template, **q, **kwargs)
        return text
    return render


def empty_model(library):
    """A model without a vocabulary, for templates."""
    folder = os.path.join(CACHE, "empty")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "tokenizer.json"), "w") as f:
        json.dump({"version": "1.0", "added_tokens": [{"id": i, **added(t)} for i, t in enumerate(SPECIAL.values())], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
                   "model": {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(SPECIAL.values())}, "unk_token": "<unk>"}}, f)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump(SPECIAL, f)
    return library.load(folder)


def compare(render, model, template, request):
    """Returns what differs, as (oracle, library), or None, and whether the oracle gave text."""
    import jinja2
    try:
        want, failed = render(template, request), None
    except Exception as e:  # noqa: BLE001: a template can fail in any way
        want, failed = None, e
    try:
        got, error = model.render(template, request), None
    except Failure as e:
        got, error = None, e
    if error is not None and error.code == UNSUPPORTED:
        return REFUSED, False
    if failed is None:
        return (None if got == want else (want, got if got is not None else str(error))), True
    if error is None:
        # minijinja iterates over None and generators, where Python fails. No text is wrong: the engine
        # refuses such a request itself.
        lenient = isinstance(failed, TypeError) and ("is not iterable" in str(failed) or "generator is not JSON" in str(failed))
        return None if lenient else (f"{type(failed).__name__}: {failed}", got), False
    if type(failed) is jinja2.exceptions.TemplateError and error.text != str(failed):
        return (f"TemplateError: {failed}", str(error)), False
    return None, False


def templates(args):
    render, model = oracle(), empty_model(Library())
    bad = rendered = total = n = 0
    unsupported = []
    for path in sorted(glob.glob(os.path.join(models(), "templates", "*.jinja"))):
        name = os.path.basename(path)
        if args.only and args.only not in name:
            continue
        with open(path, encoding="utf-8") as f:
            template = f.read()
        different, texts, refused = [], 0, 0
        for i in range(args.conversations):
            request = conversation(f"{name} {i}")
            d, text = compare(render, model, template, request)
            texts += text
            if d is REFUSED:
                refused += 1
                continue
            if d:
                different.append((i, request, *d))
        n += 1
        total += args.conversations
        rendered += texts
        if refused:
            unsupported.append(name)
        bad += len(different)
        print(f"{name}: {args.conversations} conversations, {texts} texts, {len(different)} differ" + (f", {refused} refused" if refused else ""))
        for i, request, want, got in different[:args.show]:
            at = next((k for k, (a, b) in enumerate(zip(want or "", got or "")) if a != b), min(len(want or ""), len(got or "")))
            print(f"  conversation {i}: {json.dumps(request, ensure_ascii=False)[:600]}")
            print(f"    want ...{want[max(0, at - 60):at + 80]!r}\n    got  ...{got[max(0, at - 60):at + 80]!r}")
    print(f"templates: {total} renderings, {rendered} texts, {bad} differ")
    RESULTS.append((f"{n} chat templates × {args.conversations} conversations", "transformers", f"{rendered:,} texts; for {total - rendered:,} conversations transformers gives none, or the template is left to the engine ({', '.join(unsupported) or 'none'})", bad))
    return bad


VLLM = os.path.join(os.path.dirname(CACHE), "vllm-0.32", "venv", "bin", "python")
FORMATS = """
import json, sys
from vllm.renderers.hf import _detect_content_format
for path in json.load(sys.stdin):
    with open(path, encoding="utf-8") as f:
        template = f.read()
    json.dump({"template": template, "name": path.rpartition("/")[2], "parts": _detect_content_format(template, default="string") == "openai"}, sys.stdout)
    print()
"""


def formats(args):
    """Whether a template gets contents as strings or as parts, by vLLM and by ContentParts (Go)."""
    paths = [p for p in sorted(glob.glob(os.path.join(models(), "templates", "*.jinja"))) if args.only in os.path.basename(p)]
    if not os.path.exists(VLLM):
        print(f"formats: no vLLM in {VLLM}; scripts/e2e-vllm.sh installs it", file=sys.stderr)
        return 1
    cases = os.path.join(CACHE, "formats.jsonl")
    with open(cases, "w", encoding="utf-8") as f:
        subprocess.run([VLLM, "-c", FORMATS], input=json.dumps(paths), stdout=f, text=True, check=True)
    test = subprocess.run(["go", "test", "-count=1", "-v", "-run", "^TestContentPartsOfArchive$", "./router/tokenize/chatinput"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "SLUICE_CONTENT_FORMATS": cases})
    bad = test.stdout.count(": parts ")
    if test.returncode and not bad or f"{len(paths)} templates" not in test.stdout:
        sys.exit("formats: the test of Go did not run:\n" + test.stdout + test.stderr)
    print(test.stdout if bad else f"formats: {len(paths)} templates, 0 differ")
    RESULTS.append((f"content format of {len(paths)} chat templates", "vLLM 0.32", f"{len(paths) - bad} templates", bad))
    return bad


# Vocabularies. GGUF lacks the normalizer and the pre-tokenizer of Hugging Face's files; they are
# reconstructed here from the name that it has instead (tokenizer.ggml.pre) and llama.cpp's rules.

GPT2 = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
BYTES = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
DIGITS = [{"type": "Digits", "individual_digits": True}]
NFC = {"type": "NFC"}


def split(pattern, behavior="Isolated"):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


LETTERS = "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
CJK = "[一-龥ࠀ-一가-퟿]+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# name: (normalizer, pre-tokenizers, ignore_merges)
BPE_RULES = {
    "llama-bpe": (None, [split(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), *BYTES], True),
    "qwen2": (NFC, [split(QWEN), *BYTES], False),
    "qwen35": (None, [split(QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")), *BYTES], False),
    "gpt-2": (None, GPT2, False), "mpt": (None, GPT2, False), "none": (NFC, GPT2, False),
    "starcoder": (None, DIGITS + GPT2, False), "refact": (None, DIGITS + GPT2, False), "command-r": (NFC, DIGITS + GPT2, False),
    "falcon": (None, [{"type": "Punctuation", "behavior": "Contiguous"}, *GPT2, {"type": "Digits", "individual_digits": False}, split("[0-9][0-9][0-9]")], False),
    "deepseek-llm": (None, [split("[\r\n]"), split(r"\s?" + LETTERS), split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$"), split(CJK), *DIGITS, *BYTES], False),
    "deepseek-coder": (None, [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(CJK), *DIGITS, *BYTES], False),
}


def sequence(kind, members):
    if not members:
        return None
    return members[0] if len(members) == 1 else {"type": "Sequence", kind: members}


def merges_by_score(vocab, scores):
    """The merges that give the pieces of a SentencePiece BPE model, best first."""
    merges = []
    for piece, rank in sorted(vocab.items(), key=lambda p: p[1]):
        local = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        local.sort(key=lambda m: (vocab[m[0]], vocab[m[1]]))
        merges += [(a, b, scores[rank]) for a, b in local]
    merges.sort(key=lambda m: -m[2])
    return [[a, b] for a, b, _ in merges]


def convert(path):
    """Returns tokenizer.json and tokenizer_config.json of a GGUF vocabulary, or None and why not."""
    import gguf
    fields = gguf.GGUFReader(path).fields

    def get(name):
        f = fields.get("tokenizer." + name)
        return None if f is None else f.contents()

    model, pre = get("ggml.model"), get("ggml.pre") or "none"
    tokens, types, scores = get("ggml.tokens"), get("ggml.token_type"), get("ggml.scores")
    kinds = {"control": 3, "user": 4, "unused": 5, "byte": 6}
    # llama.cpp marks added tokens that are not special as user-defined, and pads vocabularies with unused ones.
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": k == kinds["control"]}
             for i, (t, k) in enumerate(zip(tokens, types)) if k in (kinds["control"], kinds["user"]) and t]
    vocab = {}
    for i, t in enumerate(tokens):
        if types[i] != kinds["unused"]:
            vocab.setdefault(t, i)
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
           "byte_fallback": False, "ignore_merges": False, "vocab": vocab}
    normalizer, pretokenizers = None, []
    if model == "t5" and get("ggml.precompiled_charsmap"):
        charsmap = base64.b64encode(bytes(v & 0xff for v in get("ggml.precompiled_charsmap"))).decode()
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": charsmap}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]}
    if model == "gpt2":
        if pre not in BPE_RULES:
            return None, f"no rules for {pre}"
        normalizer, pretokenizers, bpe["ignore_merges"] = BPE_RULES[pre]
        bpe["merges"] = [m.split(" ") for m in get("ggml.merges")]
    elif model == "gemma4":
        normalizer, pretokenizers = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, [split("[^\n]+|[\n]+")]
        bpe.update(merges=[m.split(" ") for m in get("ggml.merges")], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    elif model == "llama":
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
        bpe.update(merges=merges_by_score(vocab, scores), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    elif model == "bert":
        words = {}
        for t, i in vocab.items():
            words[t if types[i] == kinds["control"] or t.startswith("[") and t.endswith("]") else t[1:] if t.startswith("▁") else "##" + t] = i
        bpe = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": words}
        normalizer, pretokenizers = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}, [{"type": "BertPreTokenizer"}]
    elif model == "t5":
        bpe = {"type": "Unigram", "unk_id": get("ggml.unknown_token_id") or 0, "vocab": [[t, float(x)] for t, x in zip(tokens, scores)], "byte_fallback": False}
        pretokenizers = [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}]
    else:
        return None, f"no rules for the model {model}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": get("chat_template")}
    for name in ["bos", "eos"]:
        i = get(f"ggml.{name}_token_id")
        # One that the vocabulary has as ordinary text is not named: transformers would add it as a special token.
        if i is not None and i < len(tokens) and any(t["id"] == i for t in added):
            config[f"{name}_token"] = tokens[i]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": sequence("pretokenizers", pretokenizers), "post_processor": None, "decoder": None, "model": bpe}, config


def corpus(r):
    """Texts that are hard for pre-tokenizers, and long lines."""
    def chars(n, *ranges):
        return "".join(chr(r.randint(*r.choice(ranges))) for _ in range(n))

    texts = list(TEXTS)
    for path in ["cmd/sluice/main.go", "router/config/config.go", "scripts/notice.py", "docs/glossary.md", "go.sum"]:
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            text = f.read()
        texts += [text[:20000], text[:3000].replace("\n", "\r\n"), text[:2000].upper()]
    texts += [chars(3000, (0x4e00, 0x9fa5), (0x3040, 0x30ff), (0xac00, 0xd7a3), (0x20, 0x7e)) for _ in range(3)]
    texts += [chars(1000, (0x1f300, 0x1faff), (0x2600, 0x27bf), (0x200d, 0x200d), (0xfe0f, 0xfe0f), (0x20, 0x20)) for _ in range(3)]
    texts += [chars(1000, (0x20, 0xd7ff), (0xe000, 0x10ffff)) for _ in range(5)]
    texts += [chars(1000, (0, 0x2ff)) for _ in range(5)] + [chars(500, (0x300, 0x36f), (0x41, 0x7a), (0x590, 0x6ff), (0x900, 0xdff)) for _ in range(5)]
    texts += ["".join(r.choice([" ", "\n", "\r", "\t", "\u00a0", "a", "1", ".", "'", "\u3000", "'s", "'LL"]) for _ in range(r.randint(1, 200))) for _ in range(200)]
    # What a server makes of malformed UTF-8 where it accepts it.
    texts += [bytes(r.randint(0, 255) for _ in range(500)).decode(errors="replace") for _ in range(5)]
    return texts


def long_lines(r):
    words = ["alpha", "Beta", "gamma1", "δέλτα", "漢字", "x_y", "100000", "'ll", "–", "(", "🙂"]
    n = 200_000
    return {"words": " ".join(r.choice(words) for _ in range(n // 6)), "letters": "".join(r.choice("abcdefghij") for _ in range(n)), "digits": "".join(r.choice("0123456789") for _ in range(n)),
            "spaces": " " * n, "spaces and a letter": " " * n + "a", "line breaks": "\n" * n, "tabs and line breaks": "\t\n" * (n // 2), "punctuation": "=-" * (n // 2), "base64": "".join(r.choice("ABCDEFabcdef0123456789+/") for _ in range(n))}


def ids(args):
    import tokenizers
    library, bad, total = Library(), 0, 0
    for path in sorted(glob.glob(os.path.join(models(), "ggml-vocab-*.gguf"))):
        name = os.path.basename(path)[len("ggml-vocab-"):-len(".gguf")]
        if args.only and args.only not in name:
            continue
        folder = os.path.join(CACHE, "vocab", name)
        config_file = os.path.join(folder, "tokenizer_config.json")
        if not os.path.exists(config_file) or os.path.getmtime(config_file) < os.path.getmtime(__file__):  # of an earlier conversion
            spec, config = convert(path)
            if spec is None:
                print(f"{name}: {config}")
                continue
            os.makedirs(folder, exist_ok=True)
            for file, v in [("tokenizer.json", spec), ("tokenizer_config.json", config)]:
                whole = os.path.join(folder, file)
                with open(whole + ".new", "w", encoding="utf-8") as f:
                    json.dump(v, f, ensure_ascii=False)
                os.replace(whole + ".new", whole)
        model, hf = library.load(folder), tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        archive = [0, 0]
        if os.path.exists(path + ".inp"):
            with open(path + ".inp", encoding="utf-8", newline="") as f:
                inputs = f.read().split("\n__ggml_vocab_test__\n")
            with open(path + ".out") as f:
                expected = [[int(x) for x in line.split()] for line in f.read().split("\n")]
            for text, want in zip(inputs, expected):
                got = model.encode(text, False)
                archive[got != want] += 1
                if got != want and archive[1] <= args.show:
                    print(f"  {name}: archive {text[:60]!r}\n    want {want[:40]}\n    got  {got[:40]}")
        r = random.Random(name)
        texts = corpus(r) + list(long_lines(r).values())
        specials = [t["content"] for t in json.loads(library.call("sluice_tok_info", model.handle, 1))][:40]
        for _ in range(50 if specials else 0):
            texts.append("".join(r.choice(TEXTS + specials + [" "]) for _ in range(20)))
        different = 0
        for text in texts:
            want, got = hf.encode(text, add_special_tokens=False).ids, model.encode(text, False)
            if want != got:
                different += 1
                if different <= args.show:
                    at = next((k for k, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
                    print(f"  {name}: {len(text)} characters, id {at} of {len(want)}: want {want[at:at + 8]}, got {got[at:at + 8]}: {text[:40]!r}")
        bad += different + archive[1]
        total += len(texts) + sum(archive)
        print(f"{name}: expected ids of the archive: {archive[0]} equal, {archive[1]} differ; tokenizers: {len(texts) - different} texts equal, {different} differ", flush=True)
        encoder = json.loads(library.call("sluice_tok_info", model.handle, 0))["encoder"]
        oracles = "expected ids of the archive, tokenizers" if sum(archive) else "tokenizers; the archive has no expected ids"
        RESULTS.append((f"{name} (reconstructed, {encoder})", oracles, f"{archive[0] + len(texts) - different} texts", different + archive[1]))
        model.close()
    print(f"ids: {total} texts, {bad} differ")
    return bad


# The pattern of Moonshot's tokenization_kimi.py.
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def folder_of(name, files):
    """Writes a model's folder; a value that is a path becomes a link."""
    folder = os.path.join(CACHE, "files", name)
    os.makedirs(folder, exist_ok=True)
    for file, value in files.items():
        path = os.path.join(folder, file)
        if os.path.lexists(path):
            os.remove(path)
        if os.path.isabs(value):
            os.symlink(value, path)
        else:
            with open(path, "w", encoding="utf-8") as f:
                f.write(value)
    return folder


def by_mistral(path):
    """The ids of mistral-common, with which vLLM tokenizes completions of Mistral's models."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    t = Tekkenizer.from_file(path)
    return lambda text, special: t.encode(text, bos=special, eos=False)


def by_tiktoken(ranks, pattern, special, normal=lambda text: text):
    import tiktoken
    encoding = tiktoken.Encoding(name="test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return lambda text, _: encoding.encode(normal(text), allowed_special="all")


def ranks_file(ranks):
    return "".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items())


def vocabulary_files():
    """Returns [(name, folder, load the oracle)]."""
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    data = os.path.join(os.path.dirname(mistral_common.__file__), "data")
    out, newest = [], None
    for path in sorted(glob.glob(os.path.join(data, "tekken_*.json"))):
        name, newest = os.path.basename(path)[:-len(".json")], path
        out.append((name, folder_of(name, {"tekken.json": path}), lambda path=path: by_mistral(path)))
    # Kimi's own ranks are in no package: Tekken's stand in for them, with Kimi's pattern and tokens.
    ranks = Tekkenizer.from_file(newest)._tekken_token2id_nospecial
    n = len(ranks)
    named = {n: "[BOS]", n + 1: "[EOS]", n + 2: "<|im_end|>", n + 3: "<|im_user|>"}
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(n, n + 256)}
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "bos_token": "[BOS]",
              "added_tokens_decoder": {str(i): {"content": t, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} for i, t in named.items()}}
    out.append(("kimi", folder_of("kimi", {"tiktoken.model": ranks_file(ranks), "tokenizer_config.json": json.dumps(config)}), lambda: by_tiktoken(ranks, KIMI, special)))

    # The ids of Qwen2's ordinary tokens are the ranks of qwen.tiktoken.
    vocab = os.path.join(CACHE, "vocab", "qwen2", "tokenizer.json")
    if os.path.exists(vocab):
        import unicodedata
        from transformers.convert_slow_tokenizer import bytes_to_unicode
        byte = {c: b for b, c in bytes_to_unicode().items()}
        with open(vocab, encoding="utf-8") as f:
            spelled = json.load(f)["model"]["vocab"]
        qwen = {bytes(byte[c] for c in t): i for t, i in spelled.items() if i < 151643}
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
        config = {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}}
        out.append(("qwen", folder_of("qwen", {"qwen.tiktoken": ranks_file(qwen), "tokenizer_config.json": json.dumps(config)}),
                    lambda: by_tiktoken(qwen, QWEN, {t: 151643 + i for i, t in enumerate(names)}, lambda text: unicodedata.normalize("NFC", text))))
    else:
        print("qwen: no vocabulary; run `scripts/tokenizer_golden.py ids --only qwen2` first")
    return out


def files(args):
    library, bad, total = Library(), 0, 0
    for name, folder, load in vocabulary_files():
        if args.only and args.only not in name:
            continue
        model, want_ids = library.load(folder), load()
        info = json.loads(library.call("sluice_tok_info", model.handle, 0))
        r = random.Random(name)
        texts = corpus(r) + [line[:20_000] for line in long_lines(r).values()]
        for _ in range(200):
            texts.append("".join(r.choice([*TEXTS, "<s>", "</s>", "[INST]", "[/INST]", "<unk>", "<|im_end|>", "<|endoftext|>", "<|reserved_token_130200|>", "<0x0A>", "▁", " "]) for _ in range(10)))
        different = 0
        for text in texts:
            for special in [False, True]:
                want, got = list(want_ids(text, special)), model.encode(text, special)
                total += 1
                if want != got:
                    different += 1
                    if different <= args.show:
                        at = next((k for k, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
                        print(f"  {name}: {len(text)} characters, id {at} of {len(want)}: want {want[at:at + 8]}, got {got[at:at + 8]}: {text[:60]!r}")
        bad += different
        print(f"{name} ({info['format']}, {info['encoder']}): {2 * len(texts) - different} encodings equal, {different} differ", flush=True)
        RESULTS.append((f"{name} ({info['format']}, {info['encoder']})", "mistral-common" if info["format"] == "tekken" else "tiktoken", f"{2 * len(texts) - different} encodings", different))
        model.close()
    print(f"files: {total} encodings, {bad} differ")
    return bad


# Folders by the class of their tokenizer.

CLASSES = os.path.join(ROOT, "native", "tokenizer", "src", "classes.json")


def known_classes():
    """What native/tokenizer/src/classes.json says, of the transformers that is installed."""
    import transformers
    from transformers.models.auto import tokenization_auto as auto
    # The source is read because its table lacks the classes of packages that are not installed.
    with open(auto.__file__, encoding="utf-8") as f:
        source = f.read()
    table = source[source.index("TOKENIZER_MAPPING_NAMES = "):source.index("MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: ")]
    types = dict(re.findall(r'\(\s*"([^"]+)",\s*"(\w+)"', table))
    for name in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        types.setdefault(name, "TokenizersBackend")
    as_is = {"PreTrainedTokenizer", "PythonBackend"}  # AutoTokenizer takes TokenizersBackend in their place
    for name in {*types.values(), *dir(transformers), "BloomTokenizer"}:
        plain = name.removesuffix("Fast")
        if not plain.endswith(("Tokenizer", "Backend")) or plain == "MistralCommonBackend":
            continue
        c = auto.tokenizer_class_from_name(plain)
        if isinstance(c, type) and issubclass(c, transformers.TokenizersBackend) and (c is transformers.TokenizersBackend or "__init__" not in c.__dict__):
            as_is.add(plain)
    return {"transformers": transformers.__version__, "model_types": dict(sorted(types.items())),
            "incorrect": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS), "as_is": sorted(as_is)}


NATIVE, REFUSED_HERE, DIFFERENT = "native", "refused", "refused, and transformers gives other ids than the file"
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def metaspace(scheme):
    return {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}}


def begins(spec, token, i):
    """A post-processor that begins texts with a token."""
    spec["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                              "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}}}


def added(token, **flags):
    return {"content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}


def class_cases():
    """Yields (name, vocabulary, what becomes of it, members of tokenizer_config.json, model type, change of tokenizer.json, other files)."""
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tool = {"additional_special_tokens": ["<|tool|>"]}
    known = {"<|eot_id|>": 128009}
    llama = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def bos(spec):
        begins(spec, "<|begin_of_text|>", 128000)

    def special(*tokens, **stages):
        """Makes tokens of the vocabulary added ones too."""
        def change(spec):
            have = {t["content"]: t for t in spec["added_tokens"]}
            for t in tokens:
                if t in spec["model"]["vocab"]:
                    have[t] = {"id": spec["model"]["vocab"][t], **added(t)}
                elif t not in have:
                    have[t] = {"id": 1 + max(*spec["model"]["vocab"].values(), *(v["id"] for v in have.values())), **added(t)}
            spec["added_tokens"] = sorted(have.values(), key=lambda t: t["id"])
            spec.update(stages)
        return change

    spm = ["<unk>", "<s>", "</s>"]
    yield "general", "llama-bpe", NATIVE, fast, "llama", bos, {}
    yield "no class", "llama-bpe", NATIVE, {"tokenizer_class": None}, "llama", bos, {}
    yield "general of an unknown model", "llama-bpe", NATIVE, {"tokenizer_class": "TokenizersBackend"}, "no-such-model", None, {}
    yield "unknown class", "llama-bpe", REFUSED_HERE, {"tokenizer_class": "NoSuchTokenizer"}, "no-such-model", None, {}
    yield "own code", "llama-bpe", REFUSED_HERE, {**fast, "auto_map": {"AutoTokenizer": [None, "m.T"]}}, "no-such-model", None, {}
    yield "split special tokens", "llama-bpe", DIFFERENT, {**fast, "split_special_tokens": True}, "llama", None, {}
    yield "Qwen2", "qwen2", NATIVE, {"tokenizer_class": "Qwen2Tokenizer"}, "qwen2", None, {}
    yield "Qwen2Fast", "qwen2", NATIVE, {"tokenizer_class": "Qwen2TokenizerFast"}, "qwen3", None, {}
    yield "Qwen2 by the model type", "qwen2", NATIVE, {"tokenizer_class": None}, "qwen3", None, {}
    yield "Qwen2 in place of another class", "qwen2", DIFFERENT, fast, "qwen2", special(normalizer=None, pre_tokenizer=sequence("pretokenizers", [*DIGITS, *GPT2])), {}
    yield "general for Qwen3", "qwen2", NATIVE, fast, "qwen3", special(normalizer=None, pre_tokenizer=sequence("pretokenizers", [*DIGITS, *GPT2])), {}
    yield "Qwen3_5", "qwen35", NATIVE, {"tokenizer_class": "Qwen3_5Tokenizer"}, "qwen3_5", special(normalizer=NFC), {}
    yield "Qwen3_5 without NFC", "qwen35", DIFFERENT, {"tokenizer_class": "Qwen3_5Tokenizer"}, "qwen3_5", None, {}
    yield "Llama of old files", "llama-spm", DIFFERENT, llama, "llama", special(*spm), {}
    yield "Llama of old files, legacy", "llama-spm", DIFFERENT, {**llama, "legacy": True}, "llama", special(*spm), {}
    yield "Llama", "llama-spm", NATIVE, llama, "llama", special(*spm, **metaspace("first")), {}
    yield "LlamaFast, legacy", "llama-spm", NATIVE, {**llama, "tokenizer_class": "LlamaTokenizerFast", "legacy": True}, "llama", special(*spm, **metaspace("always")), {}
    yield "Llama, the other scheme", "llama-spm", DIFFERENT, llama, "llama", special(*spm, **metaspace("always")), {}
    yield "Llama without prefix", "llama-spm", NATIVE, {**llama, "add_prefix_space": False}, "llama", special(*spm, **metaspace("never")), {}
    yield "Llama class of Mistral", "llama-spm", NATIVE, llama, "mistral", special(*spm), {}
    yield "Llama class of Phi-3", "phi-3", NATIVE, {"tokenizer_class": "LlamaTokenizerFast"}, "phi3", None, {}
    yield "Llama class of DeepSeek-V3", "deepseek-llm", NATIVE, {"tokenizer_class": "LlamaTokenizerFast"}, "deepseek_v3", None, {}
    yield "Llama class of byte-level files", "deepseek-llm", DIFFERENT, {"tokenizer_class": "LlamaTokenizerFast"}, "llama", special("<unk>"), {}
    yield "Gemma", "gemma-4", NATIVE, {"tokenizer_class": "GemmaTokenizer"}, "gemma2", special("<unk>", "<bos>", "<eos>", "<pad>", "<mask>", normalizer=SPACE, pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}), {}
    yield "Gemma with another pre-tokenizer", "gemma-4", REFUSED_HERE, {"tokenizer_class": "GemmaTokenizer"}, "gemma2", special("<unk>", "<bos>", "<eos>", "<pad>", "<mask>"), {}
    yield "GPT2", "gpt-2", NATIVE, {"tokenizer_class": "GPT2Tokenizer"}, "gpt2", None, {}
    yield "GPT2 with a prefix", "gpt-2", DIFFERENT, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "gpt2", None, {}
    yield "GPTNeoX", "gpt-neox", NATIVE, {"tokenizer_class": "GPTNeoXTokenizerFast", "pad_token": "<|padding|>"}, "gpt_neox", special("<|endoftext|>", "<|padding|>", normalizer=NFC), {}
    yield "GPTNeoX that adds a token", "gpt-neox", DIFFERENT, {"tokenizer_class": "GPTNeoXTokenizer"}, "gpt_neox", lambda spec: (special("<|endoftext|>", "<|padding|>", normalizer=NFC)(spec), begins(spec, "<|endoftext|>", 0)), {}
    yield "Cohere", "command-r", NATIVE, {"tokenizer_class": "CohereTokenizerFast"}, "cohere", special("<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>", "<CLS>", "<SEP>", "<MASK_TOKEN>"), {}
    yield "Roberta", "gpt-2", REFUSED_HERE, {"tokenizer_class": "RobertaTokenizer"}, "roberta", None, {}
    yield "Bert", "bert-bge", REFUSED_HERE, {"tokenizer_class": "BertTokenizer"}, "bert", None, {}
    yield "additional special token", "llama-bpe", DIFFERENT, {**fast, **tool}, "llama", None, {}
    yield "additional special token, known", "llama-bpe", NATIVE, {**fast, "additional_special_tokens": list(known)}, "llama", None, {}
    yield "extra special tokens by name", "llama-bpe", DIFFERENT, {**fast, "extra_special_tokens": {"tool_token": "<|tool|>"}}, "llama", None, {}
    yield "token of another name", "llama-bpe", DIFFERENT, {**fast, "image_token": "<image>"}, "llama", None, {}
    yield "token of another name, known", "llama-bpe", NATIVE, {**fast, "image_token": "<|eot_id|>"}, "llama", None, {}
    yield "special_tokens_map.json", "llama-bpe", NATIVE, {**fast, "eos_token": "<|end_of_text|>"}, "llama", bos, {"special_tokens_map.json": {"eos_token": "<|eot_id|>", "pad_token": added("<|eot_id|>")}}
    yield "special_tokens_map.json, unknown token", "llama-bpe", DIFFERENT, fast, "llama", None, {"special_tokens_map.json": {"pad_token": "<pad>"}}
    yield "special_tokens_map.json, unused", "llama-bpe", NATIVE, {**fast, "added_tokens_decoder": {"128009": added("<|eot_id|>")}}, "llama", None, {"special_tokens_map.json": {"pad_token": "<pad>"}}
    yield "added_tokens.json", "llama-bpe", DIFFERENT, fast, "llama", None, {"added_tokens.json": {"<tool>": 128256}}
    yield "added_tokens.json, known token", "llama-bpe", NATIVE, fast, "llama", None, {"added_tokens.json": known}
    yield "added_tokens_decoder", "llama-bpe", NATIVE, {**fast, "added_tokens_decoder": {"128256": added("<tool>"), "128257": added("<b>", special=False, lstrip=True)}}, "llama", None, {}
    yield "added_tokens_decoder of Qwen2", "qwen2", REFUSED_HERE, {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"151643": added("<|endoftext|>")}}, "qwen2", None, {}


# What a template prints of the special tokens.
NAMED = "|".join("{{ %s_token }}" % name for name in ["bos", "eos", "unk", "pad", "cls", "image"])


def classes(args):
    """Loads whole folders with transformers, as vLLM does, and compares ids with those of the library."""
    import logging
    import shutil

    import tokenizers
    import transformers
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    library, bad, n = Library(), 0, 0
    with open(CLASSES, encoding="utf-8") as f:
        if json.load(f) != known_classes():
            print(f"classes: {os.path.relpath(CLASSES)} is not what transformers says; run `scripts/tokenizer_golden.py rewrite`")
            bad += 1
    counts = {}
    for name, vocabulary, expected, members, model_type, change, others in class_cases():
        if args.only and args.only not in name:
            continue
        source = os.path.join(CACHE, "vocab", vocabulary)
        if not os.path.exists(os.path.join(source, "tokenizer_config.json")):
            print(f"{name}: no vocabulary; run `scripts/tokenizer_golden.py ids --only {vocabulary}` first")
            bad += 1
            continue
        with open(os.path.join(source, "tokenizer.json"), encoding="utf-8") as f:
            spec = json.load(f)
        with open(os.path.join(source, "tokenizer_config.json"), encoding="utf-8") as f:
            config = {k: v for k, v in {**json.load(f), **members}.items() if v is not None}
        if change:
            change(spec)
        files = {"tokenizer.json": spec, "tokenizer_config.json": config, "config.json": {"model_type": model_type}, **others}
        folder = folder_of("class", {file: json.dumps(v, ensure_ascii=False) for file, v in files.items()})
        n += 1
        try:
            model, why = library.load(folder), ""
        except Failure as e:
            model, why = None, e.text
        wrong = []
        try:
            oracle_of = transformers.AutoTokenizer.from_pretrained(folder, mistral_format=False)
        except Exception as e:  # noqa: BLE001: what transformers cannot load has no ids
            oracle_of = None
            if expected != REFUSED_HERE:
                wrong.append(f"transformers: {e}")
        if (model is not None) != (expected == NATIVE):
            wrong.append(f"expected to be {expected}, " + (f"refused: {why}" if model is None else "loaded"))
        r = random.Random(name)
        names = [t["content"] for t in spec["added_tokens"]][:40] + ["<|tool|>", "<image>", "<pad>", "<tool>", "<b>", "[CLS]"]
        texts = ["Hello", " Hello", "  Hello", "", " "] + corpus(r)[::4] + ["".join(r.choice(TEXTS + names + [" "]) for _ in range(20)) for _ in range(100)]
        file = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        equal = differ = 0
        of_file = True
        for text in texts if oracle_of is not None else []:
            for add in [False, True]:
                want = oracle_of.encode(text, add_special_tokens=add)
                of_file &= file.encode(text, add_special_tokens=add).ids == want
                if model is None:
                    continue
                got = model.encode(text, add)
                equal += got == want
                differ += got != want
                if got != want and differ <= args.show:
                    wrong.append(f"{text[:40]!r}, special tokens {add}: want {want[:20]}, got {got[:20]}")
        if expected == DIFFERENT and of_file:
            wrong.append("transformers gives the ids of tokenizer.json")
        if model is not None:
            if oracle_of is not None:
                want, got = oracle_of.apply_chat_template([{"role": "user", "content": "x"}], chat_template=NAMED, tokenize=False), model.render(NAMED, {"messages": [{"role": "user", "content": "x"}]})
                if want != got:
                    wrong.append(f"special tokens of templates: want {want}, got {got}")
            model.close()
        bad += bool(wrong)
        counts[expected] = counts.get(expected, 0) + 1
        print(f"{name} ({vocabulary}): " + ("; ".join(wrong) if wrong else f"{equal} encodings equal" if model is not None else f"refused: {why}"), flush=True)
        shutil.rmtree(folder)
    print(f"classes: {n} folders, {bad} differ from what is expected")
    RESULTS.append((f"{n} folders by tokenizer class, special and added tokens", "AutoTokenizer of transformers", f"{counts.get(NATIVE, 0)} folders; {n - counts.get(NATIVE, 0)} are left to the engine, {counts.get(DIFFERENT, 0)} of them have other ids than tokenizer.json", bad))
    return bad


# The filters of templates, and json.dumps as transformers' tojson calls it.
ESCAPES = {"tojson": {"ensure_ascii": False}, "tojson(ensure_ascii=true)": {"ensure_ascii": True}}


def characters():
    """All characters of the basic plane, and some of the others."""
    return [chr(c) for c in range(0x110000) if (c < 0x10000 or c % 0x1000 < 4 or c == 0x1f642) and not 0xd800 <= c < 0xe000]


def escapes(args):
    model, bad = empty_model(Library()), 0
    every = characters()
    for template, options in ESCAPES.items():
        got = json.loads("[" + model.render("{% for c in messages[0].content %}{{ c | " + template + " | tojson }},{% endfor %}", {"messages": [{"role": "user", "content": every}]}).rstrip(",") + "]")
        different = [c for c, g in zip(every, got, strict=True) if g != json.dumps(c, **options)]
        for c in different[:args.show]:
            print(f"  {template}: U+{ord(c):04X}: want {json.dumps(c, **options)!r}, got {got[every.index(c)]!r}")
        bad += len(different)
        print(f"{template}: {len(every)} characters, {len(different)} differ")
        RESULTS.append((f"`{template}`", "json.dumps", f"{len(every) - len(different):,} characters", len(different)))
    return bad


def everything(args):
    bad = templates(args) + (formats(args) if os.path.exists(VLLM) else 0) + ids(args) + files(args) + classes(args) + escapes(args)
    lines = ["| what | beside | equal | different |", "| --- | --- | --- | --- |"] + ["| %s | %s | %s | %d |" % row for row in RESULTS]
    lines += ["", f"{', '.join(PACKAGES)}; material of {ARCHIVE}."]
    print("\n".join(lines))
    if args.report:
        with open(args.report, encoding="utf-8") as f:
            page = f.read()
        if BEGIN not in page or END not in page:
            sys.exit(f"{args.report} has no {BEGIN} … {END}")
        with open(args.report, "w", encoding="utf-8") as f:
            f.write(re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: "\n".join([BEGIN, *lines, END]), page, flags=re.S))
    return bad


def rewrite(args):
    """Writes what `go test` compares the library with, from templates and texts of the project's own,
    and which classes transformers has."""
    with open(CLASSES, "w", encoding="utf-8") as f:
        json.dump(known_classes(), f, indent=1)
        f.write("\n")
    render = oracle()
    folder = os.path.join(ROOT, "native", "tokenizer", "testdata")
    with open(os.path.join(folder, "golden.jsonl"), "w", encoding="utf-8") as f:
        for path in sorted(glob.glob(os.path.join(folder, "templates", "*.jinja"))):
            name = os.path.basename(path)
            with open(path, encoding="utf-8") as t:
                template = t.read()
            for i in range(40):
                case = {"template": name, "request": conversation(f"golden {name} {i}")}
                try:
                    case["text"] = render(template, case["request"])
                except Exception as e:  # noqa: BLE001: a template can fail in any way
                    case["error"] = str(e) if type(e).__name__ == "TemplateError" else ""
                f.write(json.dumps(case, ensure_ascii=False) + "\n")
    digests = {template: hashlib.sha256(json.dumps("".join(characters()), **options).encode()).hexdigest() for template, options in ESCAPES.items()}
    with open(os.path.join(folder, "escapes.json"), "w", encoding="utf-8") as f:
        json.dump(digests, f, indent=1)
        f.write("\n")
    return 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["templates", "formats", "ids", "files", "classes", "escapes", "all", "rewrite"])
    p.add_argument("--conversations", type=int, default=500)
    p.add_argument("--only", default="")
    p.add_argument("--show", type=int, default=1)
    p.add_argument("--report", metavar="FILE")
    args = p.parse_args()
    environment()
    os.environ["TZ"] = "UTC"
    sys.exit(1 if {"all": everything, **globals()}[args.what](args) else 0)


if __name__ == "__main__":
    main()
