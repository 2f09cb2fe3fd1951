//! The C ABI, called as a C program calls it, with valid and broken vocabularies, templates and
//! texts. scripts/tokenizer_check.sh runs it with the address sanitizer and checks for overflow.

use std::ffi::{CString, c_int};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use sluice_tokenizer::*;

const OK: c_int = 0;
const ARGUMENT: c_int = 1;
const UNSUPPORTED: c_int = 3;
const INPUT: c_int = 4;
const TEMPLATE: c_int = 5;
const LIMIT: c_int = 6;
const DEADLINE: c_int = 7;
const PANIC: c_int = 8;
const REFUSED: c_int = 10;

/// `struct sluice_tok_result`, whose fields the library keeps to itself.
#[repr(C)]
struct Raw {
    data: *mut u8,
    len: usize,
    size: usize,
}

/// Makes a call and returns its code and its result, which is freed as a caller must.
fn call(f: impl FnOnce(*mut RawResult) -> c_int) -> (c_int, Vec<u8>, usize) {
    let mut raw = Raw { data: 1 as *mut u8, len: 7, size: 7 }; // the call must overwrite all of it
    let out = (&raw mut raw).cast::<RawResult>();
    let code = f(out);
    let data = if raw.data.is_null() { Vec::new() } else { unsafe { std::slice::from_raw_parts(raw.data, raw.size) }.to_vec() };
    let len = raw.len;
    unsafe { sluice_tok_free(out) };
    assert!(raw.data.is_null() && raw.len == 0 && raw.size == 0);
    unsafe { sluice_tok_free(out) }; // an empty result is fine
    (code, data, len)
}

struct Model(*mut Handle);

impl Drop for Model {
    fn drop(&mut self) {
        unsafe { sluice_tok_close(self.0) };
    }
}

impl Model {
    fn load(dir: &Path) -> Result<Model, (c_int, String)> {
        let dir = CString::new(dir.to_str().unwrap()).unwrap();
        let mut handle = null_mut();
        let (code, text, _) = call(|out| unsafe { sluice_tok_load(dir.as_ptr(), null(), &mut handle, out) });
        assert_eq!(handle.is_null(), code != OK);
        if code == OK { Ok(Model(handle)) } else { Err((code, String::from_utf8(text).unwrap())) }
    }

    /// Encodes into an array of cap ids, exactly as long as that.
    fn encode(&self, text: &[u8], cap: usize) -> (c_int, Vec<u32>) {
        let mut ids = vec![u32::MAX; cap].into_boxed_slice();
        let dst = if cap == 0 { null_mut() } else { ids.as_mut_ptr() };
        let (code, data, len) = call(|out| unsafe { sluice_tok_encode(self.0, text.as_ptr(), text.len(), 3, dst, cap, out) });
        if code != OK {
            return (code, Vec::new());
        }
        if data.is_empty() {
            assert!(len <= cap);
            return (code, ids[..len].to_vec());
        }
        assert_eq!(data.len(), 4 * len);
        (code, data.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect())
    }

    fn render(&self, template: &[u8], input: &[u8]) -> (c_int, Vec<u8>) {
        let (code, text, _) = call(|out| unsafe { sluice_tok_render(self.0, template.as_ptr(), template.len(), input.as_ptr(), input.len(), 1_000_000_000, out) });
        (code, text)
    }
}

fn tiny() -> Model {
    Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tiny")).unwrap()
}

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("sluice-tokenizer-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Folder(dir)
    }

    fn load(&self, file: &str, data: &[u8], config: &str) -> Result<Model, (c_int, String)> {
        for f in std::fs::read_dir(&self.0).unwrap() {
            std::fs::remove_file(f.unwrap().path()).unwrap();
        }
        std::fs::write(self.0.join(file), data).unwrap();
        if !config.is_empty() {
            std::fs::write(self.0.join("tokenizer_config.json"), config).unwrap();
        }
        Model::load(&self.0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn base64(token: &[u8]) -> String {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for part in token.chunks(3) {
        let bits = part.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - part.len()));
        for i in 0..4 {
            out.push(if i <= part.len() { digits[(bits >> (18 - 6 * i)) as usize & 63] as char } else { '=' });
        }
    }
    out
}

/// tiktoken's file of all bytes, "ab" (256), "abc" (257) and "cab" (258).
fn ranks() -> String {
    let bytes = (0..=255u8).map(|b| vec![b]);
    let words = ["ab", "abc", "cab"].map(|w| w.as_bytes().to_vec());
    bytes.chain(words).enumerate().map(|(rank, token)| format!("{} {rank}\n", base64(&token))).collect()
}

fn tekken() -> String {
    let vocab: Vec<String> = ranks()
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(token, rank)| format!(r#"{{"rank":{rank},"token_bytes":"{token}"}}"#))
        .collect();
    format!(
        r#"{{"config":{{"pattern":"[a-z]+|[^a-z]+","default_vocab_size":269,"default_num_special_tokens":10}},"vocab":[{}]}}"#,
        vocab.join(",")
    )
}

const KIMI: &str = r#"{"auto_map":{"AutoTokenizer":["tokenization_kimi.TikTokenTokenizer",null]}}"#;
const QWEN: &str = r#"{"auto_map":{"AutoTokenizer":["tokenization_qwen.QWenTokenizer",null]}}"#;

#[test]
fn null_pointers_are_refused() {
    let mut handle = null_mut();
    assert_eq!(unsafe { sluice_tok_load(c"x".as_ptr(), null(), &mut handle, null_mut()) }, ARGUMENT);
    assert_eq!(call(|out| unsafe { sluice_tok_load(null(), null(), &mut handle, out) }).0, ARGUMENT);
    assert_eq!(call(|out| unsafe { sluice_tok_load(c"x".as_ptr(), null(), null_mut(), out) }).0, ARGUMENT);
    assert_eq!(call(|out| unsafe { sluice_tok_info(null(), 0, out) }).0, ARGUMENT);
    assert_eq!(call(|out| unsafe { sluice_tok_encode(null(), null(), 0, 0, null_mut(), 0, out) }).0, ARGUMENT);
    assert_eq!(call(|out| unsafe { sluice_tok_render(null(), null(), 0, null(), 0, 0, out) }).0, ARGUMENT);
    unsafe { sluice_tok_close(null_mut()) };
    unsafe { sluice_tok_free(null_mut()) };
}

#[test]
fn ids_fit_or_are_the_librarys() {
    let m = tiny();
    // <|begin|>, the bytes of the text, <|end|> in it.
    let text = "ab<|end|>é".as_bytes();
    let want = [256, 97, 98, 257, 0xc3, 0xa9];
    for cap in 0..9 {
        assert_eq!(m.encode(text, cap), (OK, want.to_vec()), "{cap} ids");
    }
    assert_eq!(m.encode(b"a\xffb", 9).0, INPUT);
    for what in 0..4 {
        let (code, text, _) = call(|out| unsafe { sluice_tok_info(m.0, what, out) });
        assert_eq!(code, if what < 3 { OK } else { ARGUMENT });
        assert!(std::str::from_utf8(&text).is_ok());
    }
}

#[test]
fn templates_render_or_fail() {
    let m = tiny();
    let chat = br#"{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true}"#;
    assert_eq!(m.render(b"", chat), (OK, b"<|begin|>user: hi<|end|>\nassistant:".to_vec()));
    assert_eq!(m.render(b"{{ messages[0].content }}", chat), (OK, b"hi".to_vec()));
    for (template, code) in [(&b"{% if %}"[..], TEMPLATE), (b"{{ raise_exception('x') }}", REFUSED), (b"{{ '\xff' }}", INPUT)] {
        assert_eq!(m.render(template, chat).0, code);
    }
    for n in 0..chat.len() {
        assert_eq!(m.render(b"", &chat[..n]).0, INPUT, "{n} bytes of the request");
    }
}

#[test]
fn vocabularies_are_converted() {
    let folder = Folder::new("valid");
    for (file, text, config, first, of) in [("tekken.json", tekken(), "", 1, 10), ("tiktoken.model", ranks(), KIMI, 257, 0), ("qwen.tiktoken", ranks(), QWEN, 257, 0)] {
        let m = folder.load(file, text.as_bytes(), config).unwrap();
        let (code, ids) = m.encode(b"abcab", 64);
        let words = [257 + of, 256 + of];
        assert_eq!((code, &ids[ids.len() - 2..], ids[0]), (OK, &words[..], if of > 0 { first } else { 257 }), "{file}");
    }
}

/// Files with a part cut, repeated or replaced load or are refused; none makes the library panic.
#[test]
fn broken_vocabularies_are_refused() {
    let folder = Folder::new("broken");
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % n as u64) as usize
    };
    let tries: usize = std::env::var("SLUICE_TOKENIZER_TRIES").ok().and_then(|s| s.parse().ok()).unwrap_or(20);
    let tiny = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tiny/tokenizer.json")).unwrap();
    let files = [("tekken.json", tekken().into_bytes(), ""), ("tiktoken.model", ranks().into_bytes(), KIMI), ("qwen.tiktoken", ranks().into_bytes(), QWEN), ("tokenizer.json", tiny, "")];
    for (file, valid, config) in &files {
        for _ in 0..tries {
            let mut data = valid.clone();
            for _ in 0..1 + random(3) {
                let at = random(data.len());
                let end = (at + random(40)).min(data.len());
                match random(4) {
                    0 => drop(data.drain(at..end)),
                    1 => data.splice(at..at, data[at..end].to_vec()).for_each(drop),
                    2 => data[at] = b"0129\"{}[],:-=+ \n\xff\0"[random(18)],
                    _ => data.truncate(at.max(1)),
                }
                if data.is_empty() {
                    break;
                }
            }
            match folder.load(file, &data, config) {
                Ok(m) => assert_ne!(m.encode("abcab é".as_bytes(), 4).0, PANIC, "{file}: {}", String::from_utf8_lossy(&data)),
                Err((code, text)) => assert_eq!(code, UNSUPPORTED, "{file}: {text}: {}", String::from_utf8_lossy(&data)),
            }
        }
    }
    for (file, text, config) in [
        ("tekken.json", r#"{"config":{"pattern":"a","default_vocab_size":18446744073709551615,"default_num_special_tokens":1},"vocab":[]}"#, ""),
        ("tekken.json", r#"{"config":{"pattern":"a","default_vocab_size":1,"default_num_special_tokens":2},"vocab":[]}"#, ""),
        ("tiktoken.model", "YQ== 4294967296\n", KIMI),
        ("tiktoken.model", "YQ== 4294967295\n", KIMI),
        ("tiktoken.model", "YWI= 0\n", KIMI),
        ("tiktoken.model", "", ""),
    ] {
        assert_eq!(folder.load(file, text.as_bytes(), config).err().unwrap().0, UNSUPPORTED, "{file}: {text}");
    }
}

/// Renders each template, which must fail because of a bound.
fn fail_in_time(m: &Model, templates: &[String], chat: &str) {
    for t in templates {
        let begin = std::time::Instant::now();
        let (code, text) = m.render(t.as_bytes(), chat.as_bytes());
        let what = format!("{}: {} after {:?}", &t[..t.len().min(120)], String::from_utf8_lossy(&text[..text.len().min(120)]), begin.elapsed());
        assert!(matches!(code, TEMPLATE | LIMIT | DEADLINE), "code {code}: {what}");
        assert!(begin.elapsed().as_secs() < 10, "{what}"); // the timeout is 1 s; this is for busy machines
    }
}

/// Each of these overflowed the stack, which ends the process, or ran on without end. Tests have a stack of 2 MiB.
#[test]
fn hostile_templates_fail_in_time() {
    let m = tiny();
    let chat = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "a".repeat(60_000));
    let nest = |body: &str, end: &str| format!("{{% set ns = namespace(x=[], y={{}}) %}}{{% for i in range(99999) %}}{body}{{% endfor %}}{end}");
    let chain = |first: &str, more: &str, n: usize| format!("{{{{ {first}{} }}}}", more.repeat(n));
    let mut templates = vec![
        // Values that contain themselves.
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_string(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x == [ns] }}".into(),
        "{% set ns = namespace() %}{% set ns.x, ns.y = ns, {'a': (ns,)} %}{{ ns|tojson }}".into(),
        "{% set ns = namespace() %}{% set ns.x | default([ns], true) %}{% endset %}{{ ns }}".into(),
        "{% set ns = namespace() %}{% for i in [1] %}{% set ns.x = loop %}{{ ns }}{% endfor %}".into(),
        "{% set ns = namespace() %}{% for i in [1]|batch(2, ns) %}{% set ns.x = i %}{{ ns }}{% endfor %}".into(),
        format!("{{% set ns = namespace() %}}{}{{{{ ns }}}}", "{% set ns = namespace(x=ns) %}".repeat(9999)),
        // Values that are nested without end.
        nest("{% set ns.x = [ns.x] %}", ""),
        nest("{% set ns.x = (ns.x,) %}", "{{ ns.x }}"),
        nest("{% set ns.y = {'a': ns.y} %}", "{{ ns.y|tojson }}"),
        nest("{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}", "{{ ns.x == ns.y }}"),
        format!("{{% set x = [] %}}{}{{{{ x }}}}", "{% set x = [x] %}".repeat(50_000)),
        format!("{{% set x = [1] %}}{}{{{{ x }}}}", "{% set x = x[0:] %}".repeat(50_000)) + "{{ 1 / 0 }}",
        // Values whose size doubles.
        nest("{% set ns.x = ns.x + ns.x + [1] %}", "{{ ns.x|length }}"),
        nest("{% set ns.x = [ns.x, ns.x] %}", ""),
        nest("{% set ns.x = (ns.x, ns.x) %}", ""),
        nest("{% set ns.y = {1: ns.y, 2: ns.y} %}", ""),
        "{% macro f(x, y) %}{% if x == y %}{% endif %}{{ f([x, x, x, x], [y, y, y, y]) }}{% endmacro %}{{ f([1], [1]) }}".into(),
        "{{ [1] * 100000000 }}".into(),
        "{{ [1] * 100000000 ~ '' }}".into(),
        "{{ 2 in 100000000 * [1] }}".into(),
        // Loops.
        nest("{% set x = messages[0].content.count('aa') %}", ""),
        nest("{% if messages[0].content[::-1] %}{% endif %}", ""),
        nest("{% set x = messages[0].content.split('a') %}", ""),
        nest("{% set x = messages|string|trim('a') %}", ""),
        nest("{% set x = messages|tojson|indent %}", ""),
        nest("{% for j in range(99999) %}{% endfor %}", ""),
        // Syntax trees.
        format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(20_000)),
        format!("{}{}", format!("{{% if 0 %}}{}", "{% elif 0 %}".repeat(150)).repeat(100), "{% endif %}".repeat(100)),
        format!("{{% set {}a{} = 1 %}}", "(".repeat(99_999), ")".repeat(99_999)),
        format!("{{{{ {}1 }}}}", "not ".repeat(150_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(400_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(99_999), "]".repeat(99_999)),
    ];
    for (first, more, n) in [("1", "+1", 60_000), ("a", " ~ b", 60_000), ("1", " and 1", 60_000), ("1", "|abs", 150_000), ("x", ".a", 300_000), ("x", "()", 300_000), ("1", " == not 1", 150_000), ("1", "--1", 200_000), ("1", " if 1 else 1", 60_000), ("messages", "[0:]", 490)] {
        templates.push(chain(first, more, n));
    }
    fail_in_time(&m, &templates, &chat);
}

/// Each of these took gigabytes of memory, which can end the process, or many times its time, with a request of
/// 1.5 MB, whose steps are bounded by what real templates take of the longest requests.
#[test]
fn hostile_templates_fail_in_memory() {
    let m = tiny();
    let chat = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "a".repeat(1_500_000));
    let b = "{% set b = messages[0].content %}";
    let many = |expression: &str| format!("{b}{{{{ [{}]|length }}}}", vec![expression; 240].join(","));
    let number = |body: &str| b.to_string() + &(0..6000).map(|i| body.replace("vN", &format!("v{i}"))).collect::<String>();
    let list = |body: &str| format!("{{% set x = messages[0].content|list %}}{}", body.replace("x+x", &["x"; 200].join("+")));
    let calls: String = (0..30).map(|i| format!("{{% macro f{i}() %}}{{% if f{0}() or f{0}() %}}{{% endif %}}{{% endmacro %}}", i + 1)).collect();
    let brackets = |inner: &str| format!("{}{inner}{}", "[".repeat(30), "]".repeat(30));
    let templates = [
        // Formats.
        "{{ '{:9000000000}'.format(1) }}".to_string(),
        "{{ '{:é>9000000000}'.format('a') }}".into(),
        "{{ '%9000000000d'|format(1) }}".into(),
        "{{ '%*d'|format(9000000000, 1) }}".into(),
        "{{ '%(a).9000000000f'|format(a=1) }}".into(),
        "{{ ('{0}' * 100000).format(messages[0].content) }}".into(),
        "{{ ('%(a)s' * 100000)|format(a=messages[0].content) }}".into(),
        // Sets of characters to strip.
        format!("{b}{{% for i in range(9999) %}}{{% set x = b.strip('éb' * 200000 ~ 'a') %}}{{% endfor %}}"),
        // What is captured.
        number("{% set vN %}{{ b }}{% endset %}"),
        number("{% set vN | upper %}{{ b }}{% endset %}"),
        format!("{{% macro f() %}}{{{{ messages[0].content }}}}{{% endmacro %}}{}", many("f()")),
        format!("{b}{{% macro f() %}}{{% set x = caller() %}}{{% set y = caller() %}}{{% endmacro %}}{}", "{% call f() %}".repeat(30) + "{{ b }}" + &"{{ b }}{% endcall %}".repeat(30)),
        format!("{b}{{% filter upper %}}{}{{% endfilter %}}", "{{ b }}".repeat(6000)),
        // Values of one expression, and variables.
        many("b ~ '1'"),
        many("b + '1'"),
        many("b|upper"),
        many("b.upper()"),
        many("b|list"),
        many("b.split('a')"),
        many("b.splitlines() + b.split('a', -1)"),
        many("'a' * 99999999"),
        number("{% set vN = b ~ 'N' %}"),
        // Filters over many items.
        "{{ messages[0].content|list|map('replace', 'a', 'b' * 16000)|list|length }}".into(),
        "{{ messages[0].content.split('a')|map('replace', '', 'b' * 16000)|list|length }}".into(),
        "{{ range(9999)|map('string')|map('replace', '', messages[0].content)|list|length }}".into(),
        format!("{{{{ [{}]|join }}}}", vec!["messages[0].content * 15"; 100].join(",")),
        "{{ messages[0].content|list|join('b' * 1000000) }}".into(),
        "{{ ('b' * 1000000).join(messages[0].content|list) }}".into(),
        "{{ messages[0].content|replace('a', 'b' * 1000000) }}".into(),
        "{{ messages[0].content.replace('a', 'b' * 1000000) }}".into(),
        "{{ messages[0].content|list|sum(start='') }}".into(),
        "{{ [1]|batch(1000000000, 'x') }}".into(),
        "{{ [1]|slice(1000000000) }}".into(),
        format!("{{{{ {}|tojson(indent='b' * 16000000) }}}}", brackets("1")),
        "{{ ('a\n' * 5000000)|indent(1000) }}".into(),
        list("{{ (x+x)|sort|length }}"),
        list("{{ (x+x)|map('upper')|length }}"),
        list("{{ 'b' in (x+x) }}"),
        list("{{ x|chain(x, x, x, x, x, x)|sort }}"),
        // Calls that double.
        format!("{calls}{{% macro f30() %}}{{% endmacro %}}{{% if f0() %}}{{% endif %}}"),
    ];
    fail_in_time(&m, &templates, &chat);
    #[cfg(all(target_os = "linux", not(debug_assertions)))]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let peak: usize = status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok()).unwrap();
        assert!(peak < 1 << 20, "the tests took {} MiB", peak >> 10);
    }
}

#[test]
fn values_are_those_of_python() {
    let m = tiny();
    let chat = br#"{"messages":[{"role":"user","content":"hi"}]}"#;
    for (template, want) in [
        // Tuples.
        ("{{ (1, 2) }}{{ (1,) }}{{ () }}{{ messages[0].items()|list }}", "(1, 2)(1,)()[('role', 'user'), ('content', 'hi')]"),
        ("{% set x = (1, [(2,)]) %}{{ x }}{{ {1: x} }}{{ x ~ '' }}{{ x|tojson }}", "(1, [(2,)]){1: (1, [(2,)])}(1, [(2,)])[1, [[2]]]"),
        ("{{ {'a': 1}|dictsort }}{{ messages|groupby('role') }}{{ (1, 2)|list }}", "[('a', 1)][('user', [{'role': 'user', 'content': 'hi'}])][1, 2]"),
        // Loops over strings.
        ("{% for c in 'héy' %}{{ c }}{{ loop.length }}{{ loop.revindex }}{{ loop.last }} {% endfor %}", "h33False é32False y31True "),
        // What only looks like a tag.
        ("{% generation %}a{%- endgeneration -%} b", "ab"),
        ("{% raw %}{% generation %}{{ x['items'] }}{% endraw %}", "{% generation %}{{ x['items'] }}"),
        ("{{ '{% generation %}' }}{# {% generation %} #}x['items']", "{% generation %}x['items']"),
        // Texts.
        ("{{ [none, true, 1.5, 'a']|join(',') }}{{ ','.join(['a', 'b']) }}{{ messages|join('.', attribute='role') }}", "None,True,1.5,aa,buser"),
        ("{{ 'aXbX'|replace('X', '--', 1) }}{{ 'abc'.replace('', '-') }}{{ 'aa'.replace('a', 'b', -1) }}", "a--bX-a-b-c-bb"),
        ("{{ ' a  b c '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ ''.split(',') }}{{ ' a  b '.split(none, 1) }}{{ 'a\n\r\nb\n'.splitlines() }}", "['a', 'b', 'c']['a', 'b,c']['']['a', 'b ']['a', '', 'b']"),
        ("{{ '{:>4}|{}'.format('a', [true]) }}{{ '%5.1f|%s'|format(1.25, none) }}{{ 'xayx'.strip('x') }}{{ 'éaé'.strip('éaéaéaéaéaéaéa') }}", "   a|[True]  1.2|Noneay"),
        ("{% macro f(a) -%}\n x{{ a }}\n{%- endmacro %}[{{ f(1) }}]{% macro g() %}\n<{{ caller(2) }}>{% endmacro %}{% call(x) g() %}\n y{{ x }}{% endcall %}", "[x1]< y2>"),
    ] {
        let (code, text) = m.render(template.as_bytes(), chat);
        assert_eq!((code, String::from_utf8(text).unwrap().as_str()), (OK, want), "{template}");
    }
    assert_eq!(m.render(b"{{ messages[0].role +}}", chat).0, TEMPLATE);
}

/// minijinja does not close what a jump leaves: such templates are left to the engine.
#[test]
fn jumps_out_of_blocks_are_refused() {
    let m = tiny();
    let chat = br#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}"#;
    for block in ["set a", "filter upper", "with a = 1", "generation"] {
        let end = block.split(' ').next().unwrap();
        for jump in ["continue", "break"] {
            let t = format!("{{% for m in messages %}}{{% {block} %}}z{{% if loop.first %}}{{% {jump} %}}{{% endif %}}{{% end{end} %}}{{% endfor %}}");
            assert_eq!(m.render(t.as_bytes(), chat).0, UNSUPPORTED, "{t}");
            let t = format!("{{% for m in messages %}}{{% {block} %}}{{% for x in [1, 2] %}}{{% {jump} %}}{{% endfor %}}{{% end{end} %}}{{{{ m.role }}}}{{% if loop.first %}}{{% {jump} %}}{{% endif %}}!{{% endfor %}}");
            let (code, text) = m.render(t.as_bytes(), chat);
            let want = if jump == "break" { "user" } else { "userassistant!" };
            assert_eq!((code, String::from_utf8(text).unwrap().as_str()), (OK, want), "{t}");
        }
    }
}

#[test]
fn bounded_values_stay_what_they_are() {
    let m = tiny();
    let chat = br#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}"#;
    for (template, want) in [
        ("{% set x = messages[1:] %}{{ x|length }}{{ x[0].role }}{{ (x + [{'role': 'r'}])[-1].role }}", "1assistantr"),
        ("{% set x = {1: 2, 'a': 'b', (1, 2): [3]} %}{{ x }}{{ x[1] }}{{ x.a }}{% for k, v in x.items() %}{{ v }}{% endfor %}", "{1: 2, 'a': 'b', (1, 2): [3]}2b2b[3]"),
        ("{% set a, b = 1, [messages[0].role] %}{{ a }}{{ b }}{% for k, (a, b) in [[1, [2, 3]]] %}{{ k }}{{ a }}{{ b }}{% endfor %}", "1['user']123"),
        ("{% with (a, b) = (1, 2), c = 3 %}{{ a }}{{ b }}{{ c }}{% endwith %}{{ messages[::-1][0].role }}", "123assistant"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}", "1True1"),
        ("{% for m in missing %}{% else %}none{% endfor %}{% for c in 'ab' %}{{ c }}.{% endfor %}", "nonea.b."),
        ("{{ 'a' is in ['a', messages] }}{{ 1 in (1, messages) }}{{ '=' * 3 }}{{ 2 * 3 + 4 * 5 }}{{ -2 * 3 }}", "TrueTrue===26-6"),
        ("{% set ns = namespace(a=1) %}{% set ns.b = ns.a ~ 'x' %}{{ ns.b }}{% macro f(a, b=[1]) %}{{ a }}{{ b }}{% endmacro %}{{ f(messages[0].role|upper, b=[2] + [3]) }}", "1xUSER[2, 3]"),
    ] {
        assert_eq!(m.render(template.as_bytes(), chat), (OK, want.as_bytes().to_vec()), "{template}");
    }
}
