//! Chat templates: minijinja with the extensions and the values of transformers'
//! `apply_chat_template` (transformers 5.19, utils/chat_template_utils.py).

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fmt::{self, Write};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectExt, ObjectRepr, Value, ValueKind};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error as JinjaError, ErrorKind, State, UndefinedBehavior};

use crate::bounds::{self, charge, work};
use crate::error::{Code, Error, Result};
use crate::json;
use crate::rewrite;
use crate::text::{self, Limited, is_space, output_limit, written};
use crate::value::{Dict, List, write_str};

/// The name under which every compiled template is kept.
const NAME: &str = "template";

/// The longest template that is compiled.
pub const MAX_TEMPLATE: usize = 1 << 20;

/// The number of templates of requests that stay compiled.
const MAX_COMPILED: usize = 16;

/// The tag by which the end of the last message is found again.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// What a rendering may use.
#[derive(Clone, Copy)]
pub struct Limits {
    /// The bytes of the text.
    pub output: usize,
    pub deadline: Option<Instant>,
}

/// A compiled template.
pub struct Template {
    envs: [OnceLock<Environment<'static>>; SIZES.len()],
    source: String,
}

/// The steps of a template are bounded by the size of the request. An environment has
/// one bound, so there is one for each of these sizes, compiled when first used.
const SIZES: [usize; 3] = [64 << 10, 1 << 20, usize::MAX];

/// Steps that a template may take: instructions, and bytes that it copies, compares or
/// writes. The templates of real models take less than a twentieth of it.
fn fuel(size: usize) -> u64 {
    4_000_000 + 32 * size.min(32 << 20) as u64
}

impl Template {
    pub fn compile(source: &str) -> Result<Template> {
        if source.len() > MAX_TEMPLATE {
            return Err(Error::new(Code::Limit, format!("the template has {} bytes; at most {MAX_TEMPLATE} are accepted", source.len())));
        }
        if joins_markup(source) {
            return Err(Error::new(Code::Unsupported, "the template joins strings that a filter has marked safe, of which Jinja escapes the others"));
        }
        let t = Template { envs: [const { OnceLock::new() }; SIZES.len()], source: source.to_string() };
        t.env(0)?;
        Ok(t)
    }

    /// The environment for requests of that many bytes.
    fn env(&self, size: usize) -> Result<&Environment<'static>> {
        let i = SIZES.iter().position(|s| size <= *s).unwrap_or(SIZES.len() - 1);
        if self.envs[i].get().is_none() {
            let mut env = environment(fuel(SIZES[i]));
            let source = rewrite::rewrite(&line_feeds(&self.source), NAME, env.syntax())?;
            env.add_template_owned(NAME, source).map_err(|e| Error::template(describe(&e)))?;
            let _ = self.envs[i].set(env); // another thread may have been faster
        }
        self.envs[i].get().ok_or_else(|| Error::new(Code::Panic, "no environment"))
    }

    /// Renders the template with the variables of a request. The text is UTF-8.
    pub fn render(&self, request: &Request, special: &[(String, String)], limits: Limits) -> Result<Vec<u8>> {
        let (root, tail) = request.variables(special, &self.source)?;
        let t = self.env(request.size)?.get_template(NAME).map_err(|e| Error::template(describe(&e)))?;
        // A rendered text is mostly a little longer than the strings of its request.
        let capacity = (request.size + request.size / 8).min(limits.output);
        let mut out = Bounded { text: Vec::with_capacity(capacity), limits };
        bounds::begin(bounds::Call { now: request.now, output: limits.output, size: request.size, deadline: limits.deadline });
        let done = t.render_captured_to(Value::from_object(root), &mut out).map(|_| ());
        if let Some(code) = bounds::end() {
            return Err(match code {
                Code::Limit => Error::new(code, format!("the template writes more than {} bytes, or reads or keeps too much", limits.output)),
                _ => Error::new(code, "the template ran past its deadline"),
            });
        }
        if let Err(e) = done {
            return Err(match e.kind() {
                ErrorKind::OutOfFuel => Error::new(Code::Limit, e.detail().unwrap_or("the template takes too many steps")),
                _ => match raised(&e) {
                    Some(text) => Error::refused(text),
                    None => Error::template(describe(&e)),
                },
            });
        }
        match tail {
            Some(tail) => cut_tail(out.text, &tail),
            None => Ok(out.text),
        }
    }
}

/// The text of a rendering, within its bounds.
struct Bounded {
    text: Vec<u8>,
    limits: Limits,
}

impl std::io::Write for Bounded {
    fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
        if self.text.len() + b.len() > self.limits.output {
            bounds::fail(Code::Limit);
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        if !work(4) {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.text.extend_from_slice(b);
        Ok(b.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What the template said if it called `raise_exception`.
fn raised(e: &JinjaError) -> Option<String> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(e);
    while let Some(c) = cause {
        if let Some(r) = c.downcast_ref::<Raised>() {
            return Some(r.0.clone());
        }
        cause = c.source();
    }
    None
}

/// The text of another error.
pub fn describe(e: &JinjaError) -> String {
    let mut text = format!("{e}");
    let mut cause = std::error::Error::source(e);
    while let Some(c) = cause {
        let _ = write!(text, ": {c}");
        cause = c.source();
    }
    text
}

/// The message of `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for Raised {}

/// Makes every line end a line feed, as Jinja does also inside of strings.
fn line_feeds(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

/// Reports whether an expression both marks a string as safe and adds strings. Jinja then
/// escapes those that are not marked (`+`, not `~`); minijinja without automatic escaping does not.
fn joins_markup(source: &str) -> bool {
    source.split("{{").skip(1).map(|t| t.split("}}").next()).chain(source.split("{%").skip(1).map(|t| t.split("%}").next())).flatten().any(|tag| {
        let marks = tag.split('|').skip(1).any(|f| {
            let name = f.trim_start();
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            matches!(&name[..end], "safe" | "e" | "escape" | "forceescape")
        });
        marks && tag.contains('+')
    })
}

/// The environment of every template, as transformers sets it up.
fn environment(fuel: u64) -> Environment<'static> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    env.set_syntax(syntax.build().expect("the default delimiters are valid"));
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_recursion_limit(100);
    env.set_fuel(Some(fuel));
    env.set_formatter(|out, _, v| {
        // What a macro or a block captures passes neither the clock nor the bound of the output.
        bounds::check(2 + (v.as_str().map_or(0, str::len) >> 12).min(1 << 20) as u32)?;
        let mut out = Limited { out, left: output_limit() };
        write_str(&mut out, v).map_err(|_| JinjaError::new(ErrorKind::WriteFailure, "cannot write"))
    });
    bounds::install(&mut env);
    env.set_unknown_method_callback(text::method);
    env.add_function("raise_exception", |state: &State, text: Value| -> std::result::Result<Value, JinjaError> {
        Err(JinjaError::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(written(state, &text)?)))
    });
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
    text::install(&mut env);
    env.add_test("sequence", |v: Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    env.add_test("iterable", |v: Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable | ValueKind::Undefined)
    });
    env.add_test("number", |v: Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
    env
}

fn tojson(state: &State, v: Value, kwargs: Kwargs) -> std::result::Result<Value, JinjaError> {
    let mut o = json::Dumps::default();
    o.ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    o.sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    if let Some(indent) = kwargs.get::<Option<Value>>("indent")? {
        if let Some(s) = indent.as_str() {
            o.indent = Some(s.to_string());
        } else if let Some(n) = indent.as_i64() {
            o.indent = Some(" ".repeat(n.clamp(0, 64) as usize));
        }
        if o.indent.is_some() {
            o.item = ",".into();
        }
    }
    if let Some(separators) = kwargs.get::<Option<Value>>("separators")? {
        let part = |i: i64| separators.get_item(&Value::from(i)).ok().and_then(|v| v.as_str().map(str::to_string));
        match (part(0), part(1)) {
            (Some(item), Some(key)) => (o.item, o.key) = (item, key),
            _ => return Err(JinjaError::new(ErrorKind::InvalidOperation, "tojson: separators are two strings")),
        }
    }
    kwargs.assert_all_used()?;
    let text = json::dumps(&v, &o, output_limit()).map_err(|e| JinjaError::new(ErrorKind::InvalidOperation, e))?;
    charge(state, text.len())?;
    Ok(Value::from(text))
}

/// The local time, as C's `strftime` writes it, which is what Python uses.
fn strftime_now(format: String) -> std::result::Result<String, JinjaError> {
    let bad = |what: &str| JinjaError::new(ErrorKind::InvalidOperation, format!("strftime_now: {what}"));
    if format.is_empty() {
        return Ok(String::new());
    }
    if format.len() > 1024 {
        return Err(bad("the format has more than 1024 bytes"));
    }
    // %f is Python's own: microseconds, which no prompt can rely on.
    let format = std::ffi::CString::new(format.replace("%f", "000000")).map_err(|_| bad("the format has a NUL"))?;
    let now = match bounds::call().and_then(|c| c.now) {
        Some(t) => t as libc::time_t,
        // SAFETY: time accepts a null pointer.
        None => unsafe { libc::time(std::ptr::null_mut()) },
    };
    let mut buf = vec![0u8; 8192];
    // SAFETY: the buffers outlive the calls, and the format ends in NUL.
    let n = unsafe {
        let mut tm: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&now, &mut tm).is_null() {
            return Err(bad("the time is out of range"));
        }
        libc::strftime(buf.as_mut_ptr().cast(), buf.len(), format.as_ptr(), &tm)
    };
    buf.truncate(n);
    String::from_utf8(buf).map_err(|_| bad("the result is not UTF-8"))
}

/// The variables of a template; unlike a dictionary of a request it has no methods.
#[derive(Debug)]
struct Root(Dict);

impl Object for Root {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_str()?).cloned()
    }
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.get(key).cloned()
    }
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|r| Box::new(r.0.iter().map(|(k, _)| Value::from(k))))
    }
}

/// The arguments of `apply_chat_template`, from the JSON document of a request.
pub struct Request {
    messages: Value,
    tools: Value,
    documents: Value,
    add_generation_prompt: bool,
    continue_field: Option<String>,
    kwargs: Option<Arc<Dict>>,
    now: Option<i64>,
    size: usize,
}

impl Request {
    pub fn parse(input: &[u8]) -> Result<Request> {
        let v = json::parse(input)?;
        let members = v.downcast_object::<Dict>().ok_or_else(|| Error::input("the input is not a JSON object"))?;
        let mut r = Request {
            messages: Value::from(()),
            tools: Value::from(()),
            documents: Value::from(()),
            add_generation_prompt: false,
            continue_field: None,
            kwargs: None,
            now: None,
            size: input.len(),
        };
        for (k, v) in members.iter() {
            let wrong = |want: &str| Error::input(format!("{k}: want {want}"));
            let null = v.is_none();
            match k {
                "messages" => {
                    let list = v.downcast_object_ref::<List>().ok_or_else(|| wrong("a list of messages"))?;
                    if list.items().is_empty() {
                        return Err(wrong("at least one message"));
                    }
                    if list.items().iter().any(|m| m.downcast_object_ref::<Dict>().is_none()) {
                        return Err(wrong("a list of objects"));
                    }
                    r.messages = v.clone();
                }
                "tools" | "documents" if null => {}
                "tools" if v.kind() == ValueKind::Seq => r.tools = v.clone(),
                "documents" if v.kind() == ValueKind::Seq => r.documents = v.clone(),
                "tools" | "documents" => return Err(wrong("a list or null")),
                "add_generation_prompt" => r.add_generation_prompt = bool::try_from(v.clone()).map_err(|_| wrong("true or false"))?,
                "continue_final_message" => match v.kind() {
                    ValueKind::Bool => r.continue_field = v.is_true().then(|| "content".to_string()),
                    ValueKind::String => r.continue_field = v.as_str().map(str::to_string),
                    ValueKind::None => {}
                    _ => return Err(wrong("true, false or the name of a field")),
                },
                "chat_template_kwargs" if null => {}
                "chat_template_kwargs" => r.kwargs = Some(v.downcast_object::<Dict>().ok_or_else(|| wrong("an object or null"))?),
                "now" => r.now = Some(v.as_i64().ok_or_else(|| wrong("seconds since 1970"))?),
                _ => return Err(Error::input(format!("unknown member {k:?}; want messages, tools, documents, add_generation_prompt, continue_final_message, chat_template_kwargs or now"))),
            }
        }
        if r.messages.is_none() {
            return Err(Error::input("messages: want a list of messages"));
        }
        if r.continue_field.is_some() && r.add_generation_prompt {
            return Err(Error::input("continue_final_message and add_generation_prompt exclude each other"));
        }
        Ok(r)
    }

    pub fn has_tools(&self) -> bool {
        !self.tools.is_none()
    }

    /// The variables of the template, and the text that the last message ends with if
    /// the answer continues it.
    fn variables(&self, special: &[(String, String)], source: &str) -> Result<(Root, Option<String>)> {
        let mut d = Dict::default();
        for (k, v) in special {
            d.insert(k, Value::from(v.as_str()));
        }
        if let Some(kwargs) = &self.kwargs {
            for (k, v) in kwargs.iter() {
                d.insert(k, v.clone());
            }
        }
        let (messages, tail) = match &self.continue_field {
            None => (self.messages.clone(), None),
            Some(field) => {
                let (m, t) = tag_tail(&self.messages, field, source)?;
                (m, Some(t))
            }
        };
        d.insert("messages", messages);
        d.insert("tools", self.tools.clone());
        d.insert("documents", self.documents.clone());
        d.insert("add_generation_prompt", Value::from(self.add_generation_prompt));
        Ok((Root(d), tail))
    }
}

/// Appends the tag to the last message's text.
fn tag_tail(messages: &Value, field: &str, source: &str) -> Result<(Value, String)> {
    let no = |what: &str| Error::refused(format!("continue_final_message: {what}"));
    let list = messages.downcast_object_ref::<List>().ok_or_else(|| no("no messages"))?;
    let mut list = list.items().to_vec();
    let last = list.last_mut().ok_or_else(|| no("no messages"))?;
    let old = last.downcast_object_ref::<Dict>().ok_or_else(|| no("the last message is not an object"))?;
    let text = old.get(field).filter(|v| !v.is_none()).ok_or_else(|| no("the last message lacks the field"))?;
    if !source.contains(field) {
        return Err(no("the template does not use the field"));
    }
    let (new, tail) = if let Some(parts) = text.downcast_object_ref::<List>() {
        let mut parts = parts.items().to_vec();
        let part = parts
            .iter_mut()
            .rev()
            .find(|p| p.downcast_object_ref::<Dict>().is_some_and(|d| d.get("text").is_some()))
            .ok_or_else(|| no("the last message has no text"))?;
        let d = part.downcast_object_ref::<Dict>().ok_or_else(|| no("the last message has no text"))?;
        let s = d.get("text").and_then(|v| v.as_str()).ok_or_else(|| no("the text of the last message is not a string"))?.to_string();
        *part = Value::from_object(d.with("text", Value::from(format!("{s}{CONTINUE_TAG}"))));
        (Value::from_object(List::new(parts)), s)
    } else {
        let s = text.as_str().ok_or_else(|| no("the field of the last message is not a string"))?;
        (Value::from(format!("{s}{CONTINUE_TAG}")), s.to_string())
    };
    *last = Value::from_object(old.with(field, new));
    Ok((Value::from_object(List::new(list)), tail))
}

/// Cuts the text at the tag.
fn cut_tail(text: Vec<u8>, tail: &str) -> Result<Vec<u8>> {
    let mut text = String::from_utf8(text).map_err(|_| Error::new(Code::Panic, "the rendered text is not UTF-8"))?;
    let bare = CONTINUE_TAG.trim_end();
    let at = text.rfind(bare).filter(|_| text.contains(tail.trim_matches(is_space)));
    let Some(at) = at else {
        return Err(Error::refused("continue_final_message is set but the final message does not appear in the chat after applying the chat template"));
    };
    let spaced = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !spaced {
        text.truncate(text.trim_end_matches(is_space).len());
    }
    Ok(text.into_bytes())
}

/// The templates of requests, compiled.
#[derive(Default)]
pub struct Cache(Mutex<HashMap<u64, Arc<Template>>>);

impl Cache {
    pub fn get(&self, source: &str) -> Result<Arc<Template>> {
        let mut h = DefaultHasher::new();
        source.hash(&mut h);
        let key = h.finish();
        let lock = || self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(t) = lock().get(&key).filter(|t| t.source == source) {
            return Ok(t.clone());
        }
        let t = Arc::new(Template::compile(source)?);
        let mut map = lock();
        if map.len() >= MAX_COMPILED {
            map.clear();
        }
        map.insert(key, t.clone());
        Ok(t)
    }
}
