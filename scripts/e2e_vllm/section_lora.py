"""A LoRA adapter with separate prefill and decode engines: texts, KV events, and the prompt as token ids."""

import json
import os
import time

import http_calls
import prompts
from engines import BLOCK_SIZE, MODEL, Engine, Metrics, wait_ready
from report import short
from router import Router
from section_pd import HITS

ADAPTER = "tiny-lora"
RANK = 8
PATHS = {
    "/v1/chat/completions": prompts.chat,
    "/v1/completions": prompts.completions,
    "/v1/responses": prompts.responses,
    "/v1/messages": prompts.chat,
}


def make_adapter(model, folder):
    """An adapter of the attention's query and value projections with random weights, as large as the
    model's own, so that its texts differ from the model's."""
    import safetensors.torch
    import torch

    os.makedirs(folder)
    with open(os.path.join(model, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[base + ".lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.2
            tensors[base + ".lora_B.weight"] = torch.randn(size, RANK, generator=generator) * 0.2
    safetensors.torch.save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": RANK, "lora_alpha": RANK,
            "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(outputs), "inference_mode": True,
        }, f)  # fmt: skip


class Section:
    def __init__(self, context):
        self.context = context
        self.report = context.report

    def run(self):
        report, context = self.report, self.context
        report.section("A LoRA adapter, with the prompt as token ids")
        model = os.path.join(context.cache, "model")
        adapter = os.path.join(context.run_dir, "adapter")
        make_adapter(model, adapter)
        more = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules", f"{ADAPTER}={adapter}")
        self.p = Engine(context.cache, context.run_dir, "prefill-lora", kv_role="kv_producer", more=more)
        self.d = Engine(context.cache, context.run_dir, "decode-lora", kv_role="kv_consumer", more=more)
        router = None
        try:
            wait_ready([self.p, self.d])
            config = os.path.join(context.run_dir, "lora.yaml")
            with open(config, "w", encoding="utf-8") as f:
                f.write("pd: {prefill_by_ids: verified}\nmodels:\n")
                f.writelines(f"  {name}: {{tokenizer: '{model}'}}\n" for name in (MODEL, ADAPTER))
            report.note("router: `sluice serve --config FILE --prefill URL --decode URL`; the file has `pd: {prefill_by_ids: verified}` and a tokenizer for the model and the adapter")
            router = self.router = Router(context.router, context.run_dir, "router-lora", ["--config", config, "--prefill", self.p.url, "--decode", self.d.url])
            router.wait_ready()
            seen = sorted(m["id"] for m in http_calls.get(router.url, "/v1/models").json()["data"])
            report.equal("`/v1/models` lists model and adapter", [MODEL, ADAPTER], seen)
            for check in (self.texts, self.caches, self.salt):
                with report.guarded(check.__name__):
                    check()
            report.equal("both engines are alive at the end", [True, True], [self.p.alive(), self.d.alive()])
        finally:
            if router:
                router.process.stop(5)
            self.p.stop()
            self.d.stop()

    def alone(self, path, body):
        """The answer of the decode engine, which computes the whole prompt for it."""
        return prompts.generated(path, http_calls.post(self.d.url, path, {**body, "cache_salt": f"alone-{time.time_ns()}"}))

    def counter(self, name, **labels):
        return int(Metrics(http_calls.get(self.router.url, "/metrics").text()).sum(name, **labels))

    def sent(self, form):
        return self.counter("sluice_prefill_prompts_total", form=form)

    def texts(self):
        """Each API gives the adapter's text, with a prompt as ids once the ids of an earlier one are confirmed."""
        for path, make in PATHS.items():
            reference = "/v1/chat/completions" if path == "/v1/messages" else path  # Anthropic's request has no salt
            end = time.monotonic() + 60
            while True:
                body = {**make(prompts.text()), "model": ADAPTER}
                before = self.sent("ids")
                seen = prompts.generated(path, self.router.ask(path, body))
                by_ids = self.sent("ids") - before
                if by_ids or time.monotonic() > end:
                    break
                time.sleep(0.5)
            expected = self.alone(reference, body)
            model = self.alone(reference, {**body, "model": MODEL})
            self.report.equal(f"`{path}`: prefill legs of this request with ids", 1, by_ids)
            self.report.row(f"`{path}`: the adapter's text of the decode instance alone", short(expected), short(seen), seen == expected and seen)
            self.report.row(f"`{path}`: the model's own text is another", "yes", "yes" if model != expected else "no", model != expected)
        self.report.equal("prompts whose ids differ from the engine's", 0, self.counter("sluice_tokenizer_mismatches_total"))

    def caches(self):
        """Model and adapter do not share KV, and the router's index knows it."""
        for first, then in ((MODEL, ADAPTER), (ADAPTER, MODEL)):
            words = prompts.text(80)
            rows = []
            for name in (first, then, first, then):
                before = self.p.metrics().sum(HITS)
                answer = self.router.ask("/v1/completions", {**prompts.completions(words), "model": name})
                time.sleep(2)  # for the events
                hits = int(self.p.metrics().sum(HITS) - before)
                rows.append((name, int(answer.headers.get("X-Sluice-Cached-Tokens") or -1), hits, answer.json()["usage"]["prompt_tokens"]))
            whole = (rows[0][3] - 1) // BLOCK_SIZE * BLOCK_SIZE
            order = f"{first}, {then}, {first}, {then}"
            self.report.equal(f"cached tokens that the router predicts of a prompt to {order}", [0, 0, whole, whole], [r[1] for r in rows])
            self.report.equal("those that the prefill engine found", [0, 0, whole, whole], [r[2] for r in rows])

    def salt(self):
        """Salts separate the KV of the adapter's requests too, and stay in legs with ids."""
        words = prompts.text(80)
        seen = []
        before = self.sent("ids")
        texts = set()
        for salt in ("a", "b", "a"):
            body = {**prompts.completions(words), "model": ADAPTER, "cache_salt": salt}
            answer = self.router.ask("/v1/completions", body)
            texts.add(prompts.generated("/v1/completions", answer))
            seen.append(int(answer.headers.get("X-Sluice-Cached-Tokens") or -1))
            time.sleep(2)  # for the events
        whole = (answer.json()["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.report.equal("cached tokens that the router predicts for the salts a, b, a", [0, 0, whole], seen)
        self.report.equal("prefill legs of these with ids", 3, self.sent("ids") - before)
        self.report.equal("texts of these three", 1, len(texts))
