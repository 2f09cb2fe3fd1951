//! A model's tokenizer and chat templates, read from its folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tokenizers::{AddedToken, Tokenizer};

use crate::class::{check, special_tokens};
use crate::convert::{Runs, convert};
use crate::encoder::Encoder;
use crate::error::{Code, Error, Result};
use crate::render::{Cache, Limits, Request, Template};

/// The largest file that is read.
const MAX_FILE: u64 = 256 << 20;

/// The longest added token.
const MAX_ADDED: usize = 4096;

/// The bounds of a model's calls.
#[derive(Clone, Copy)]
pub struct Bounds {
    pub input: usize,
    pub output: usize,
    /// Encode with Hugging Face's tokenizers in any case.
    pub reference: bool,
}

/// A loaded model. It does not change after loading, so any number of threads may use it.
pub struct Model {
    encoder: Encoder,
    templates: Templates,
    cache: Cache,
    special: Vec<(String, String)>,
    added: Vec<Added>,
    pub bounds: Bounds,
    info: Json,
    spec: Json,
    runs: Option<Runs>,
}

/// The model's templates by name, and of those that cannot be rendered why not.
type Templates = BTreeMap<String, Result<Template>>;

/// An added token: it is split from the text before the model's own rules.
pub struct Added {
    pub id: u32,
    pub token: AddedToken,
}

pub fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let fail = |e: std::io::Error| Error::new(Code::NotFound, format!("{}: {e}", path.display()));
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e)),
        Ok(m) if m.len() > MAX_FILE => {
            return Err(Error::new(Code::Limit, format!("{} has {} bytes; at most {MAX_FILE} are read", path.display(), m.len())));
        }
        Ok(_) => {}
    }
    std::fs::read(path).map(Some).map_err(fail)
}

pub fn read_json(dir: &Path, name: &str) -> Result<Json> {
    let path = dir.join(name);
    let Some(text) = read(&path)? else { return Ok(Json::Null) };
    serde_json::from_slice(&text).map_err(|e| Error::new(Code::Unsupported, format!("{}: {e}", path.display())))
}

fn read_text(path: PathBuf) -> Result<Option<String>> {
    let Some(text) = read(&path)? else { return Ok(None) };
    String::from_utf8(text).map(Some).map_err(|_| Error::new(Code::Unsupported, format!("{} is not UTF-8", path.display())))
}

impl Model {
    pub fn load(dir: &Path, bounds: Bounds) -> Result<Model> {
        let config = read_json(dir, "tokenizer_config.json")?;
        let path = dir.join("tokenizer.json");
        let mistral = is_mistral(dir);
        let (text, source) = match if mistral { None } else { read(&path)? } {
            Some(text) => (text, None),
            None => match convert(dir, &config)? {
                Some(c) => (c.spec.to_string().into_bytes(), Some(c)),
                None => {
                    let code = if dir.is_dir() { Code::Unsupported } else { Code::NotFound };
                    return Err(Error::new(code, format!("{}: no such file, nor tekken.json, tiktoken.model or qwen.tiktoken", path.display())));
                }
            },
        };
        let path = source.as_ref().map_or(path, |c| c.file.clone());
        let mut tokenizer = Tokenizer::from_bytes(&text)
            .map_err(|e| Error::new(Code::Unsupported, format!("{}: {e}", path.display())))?;
        // Truncation and padding belong to training; servers set their own.
        let _ = tokenizer.with_truncation(None);
        tokenizer.with_padding(None);
        // A conversion has all of its tokens.
        let (plain, special) = if source.is_some() {
            (true, special_tokens(dir, &config, &[])?)
        } else {
            let plain = !add_configured_tokens(&mut tokenizer, &config);
            (plain, check(dir, &config, &tokenizer, &text)?)
        };
        let special = special.named;
        // Mistral's servers render by code.
        let templates = if mistral || source.as_ref().is_some_and(|c| c.format == "tekken") { BTreeMap::new() } else { templates(dir, &config)? };
        let mut added: Vec<Added> = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| Added { id, token })
            .collect();
        added.sort_by_key(|a| a.id);
        let mut info = info(dir, &tokenizer, &config, &templates, &special)?;
        let encoder = Encoder::choose(tokenizer, &text, plain && !bounds.reference);
        info["encoder"] = json!(encoder.name());
        info["format"] = json!(source.as_ref().map_or("tokenizer.json", |c| c.format));
        let runs = source.as_ref().and_then(|c| c.runs);
        let mut spec = source.map_or(Json::Null, |c| c.spec);
        if spec.is_object() {
            spec["model"]["vocab"] = json!({});
            spec["model"]["merges"] = json!([]);
        }
        Ok(Model { encoder, templates, cache: Cache::default(), special, added, bounds, info, spec, runs })
    }

    /// The tokenizer.json that was made from another file, without vocabulary and merges;
    /// null if the folder has its own.
    pub fn spec(&self) -> &Json {
        &self.spec
    }

    pub fn info(&self) -> &Json {
        &self.info
    }

    /// The added tokens in the order of their ids.
    pub fn added(&self) -> Json {
        self.added
            .iter()
            .map(|a| {
                let t = &a.token;
                json!({"id": a.id, "content": t.content, "special": t.special, "normalized": t.normalized,
                    "lstrip": t.lstrip, "rstrip": t.rstrip, "single_word": t.single_word})
            })
            .collect()
    }

    /// Renders a request with the template of that name or source; "" is the model's.
    pub fn render(&self, template: &str, input: &[u8], limits: Limits) -> Result<Vec<u8>> {
        self.check(input)?;
        let request = Request::parse(input)?;
        if let Some(t) = self.named(template, request.has_tools())? {
            return t.render(&request, &self.special, limits);
        }
        self.cache.get(template)?.render(&request, &self.special, limits)
    }

    fn named(&self, template: &str, tools: bool) -> Result<Option<&Template>> {
        if !template.is_empty() {
            return if self.templates.len() > 1 { self.get(template) } else { Ok(None) };
        }
        if tools && let Some(t) = self.get("tool_use")? {
            return Ok(Some(t));
        }
        match self.get("default")? {
            Some(t) => Ok(Some(t)),
            None => Err(Error::new(Code::Unsupported, "the model has no chat template")),
        }
    }

    /// The template of a name. One that the library cannot render is an error: an engine
    /// would use it, and no other in its place.
    fn get(&self, name: &str) -> Result<Option<&Template>> {
        match self.templates.get(name) {
            None => Ok(None),
            Some(Ok(t)) => Ok(Some(t)),
            Some(Err(e)) => Err(Error::new(Code::Unsupported, format!("the chat template {name:?}: {e}"))),
        }
    }

    fn check(&self, input: &[u8]) -> Result<()> {
        if input.len() > self.bounds.input {
            return Err(Error::new(Code::Limit, format!("the input has {} bytes; at most {} are accepted", input.len(), self.bounds.input)));
        }
        Ok(())
    }

    fn text<'a>(&self, text: &'a [u8]) -> Result<&'a str> {
        self.check(text)?;
        std::str::from_utf8(text).map_err(|e| Error::input(format!("the text is not UTF-8 at byte {}", e.valid_up_to())))
    }

    /// The ids of a text, as the engines' call of `encode`.
    pub fn encode(&self, text: &[u8], add_special: bool, admit: bool) -> Result<Vec<u32>> {
        let text = self.text(text)?;
        if self.runs.is_some_and(|r| !r.whole(text)) {
            return Err(Error::new(Code::Limit, "the model's own program cuts a text of this length or with such a long word"));
        }
        self.encoder.encode(text, add_special, admit)
    }
}

/// Reports whether vLLM reads the folder with mistral-common, whatever else is in it
/// (vLLM 0.32, tokenizers/registry.py).
fn is_mistral(dir: &Path) -> bool {
    let (mut weights, mut vocabulary) = (false, false);
    for f in std::fs::read_dir(dir).into_iter().flatten().flatten().take(4096) {
        let name = f.file_name();
        let name = name.to_str().unwrap_or_default();
        weights |= name.starts_with("consolidated") && name.ends_with(".safetensors");
        vocabulary |= name == "tekken.json" || name.starts_with("tokenizer.model.v");
    }
    weights && vocabulary
}

/// Adds the tokens of tokenizer_config.json that tokenizer.json lacks, as transformers
/// does when it loads the folder.
/// It reports whether there were any.
fn add_configured_tokens(t: &mut Tokenizer, config: &Json) -> bool {
    let Some(decoder) = config["added_tokens_decoder"].as_object() else { return false };
    let mut entries: Vec<(u32, AddedToken)> = decoder
        .iter()
        .filter_map(|(id, v)| Some((id.parse().ok()?, serde_json::from_value(v.clone()).ok()?)))
        .filter(|(_, a): &(u32, AddedToken)| !a.content.is_empty() && a.content.len() <= MAX_ADDED)
        .collect();
    entries.sort_by_key(|e| e.0);
    let known = t.get_added_tokens_decoder();
    let new: Vec<AddedToken> = entries.into_iter().filter(|(id, a)| known.get(id) != Some(a)).map(|e| e.1).collect();
    if new.is_empty() {
        return false;
    }
    let _ = t.add_tokens(new);
    true
}

/// The text of a special token: a string, or an object with its content.
pub fn token_text(v: &Json) -> Option<&str> {
    v.as_str().or_else(|| v["content"].as_str())
}

/// The model's templates by name; a model with one calls it "default".
fn templates(dir: &Path, config: &Json) -> Result<Templates> {
    let mut sources = BTreeMap::new();
    match &config["chat_template"] {
        Json::String(s) => {
            sources.insert("default".to_string(), s.clone());
        }
        Json::Array(list) => {
            for t in list {
                if let (Some(name), Some(s)) = (t["name"].as_str(), t["template"].as_str()) {
                    sources.insert(name.to_string(), s.to_string());
                }
            }
        }
        _ => {}
    }
    let mut files = BTreeMap::new();
    if let Some(s) = read_text(dir.join("chat_template.jinja"))? {
        files.insert("default".to_string(), s);
    }
    if let Ok(more) = std::fs::read_dir(dir.join("additional_chat_templates")) {
        for f in more.flatten().take(64) {
            let path = f.path();
            let name = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default().to_string();
            if path.extension().is_some_and(|e| e == "jinja") && let Some(s) = read_text(path)? {
                files.insert(name, s);
            }
        }
    }
    if !files.is_empty() {
        sources = files;
    }
    // With a template that the library cannot render the model is still of use for its ids.
    Ok(sources.into_iter().map(|(name, s)| (name, Template::compile(&s))).collect())
}

fn info(dir: &Path, t: &Tokenizer, config: &Json, templates: &Templates, special: &[(String, String)]) -> Result<Json> {
    let generation = read_json(dir, "generation_config.json")?;
    let id = |name: &str| special.iter().find(|(k, _)| k == name).and_then(|(_, v)| t.token_to_id(v));
    let with: Vec<u32> = t.encode_fast("", true).map(|e| e.get_ids().to_vec()).unwrap_or_default();
    Ok(json!({
        "kind": kind(t),
        "vocab_size": t.get_vocab_size(true),
        "bos_id": id("bos_token"),
        "eos_id": id("eos_token"),
        "eos_ids": generation["eos_token_id"],
        "added_ids": with,
        "templates": templates.iter().filter(|(_, t)| t.is_ok()).map(|(name, _)| name).collect::<Vec<_>>(),
        "tokenizer_class": config["tokenizer_class"],
        "model_max_length": config["model_max_length"],
    }))
}

fn kind(t: &Tokenizer) -> &'static str {
    use tokenizers::models::ModelWrapper::*;
    match t.get_model() {
        BPE(_) => "bpe",
        WordPiece(_) => "wordpiece",
        WordLevel(_) => "wordlevel",
        Unigram(_) => "unigram",
    }
}
