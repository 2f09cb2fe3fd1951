package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Bounds of a file: its size in bytes, the number of values after aliases are expanded, and the
// nesting by brackets or by dashes on one line. The parser recurses, and a stack overflow would end
// the process.
const (
	maxFile     = 1 << 20
	maxValues   = 200_000
	maxBrackets = 50_000
	maxLine     = 32 << 10
)

// Load reads a YAML file, applies it to the defaults and checks the result. Errors in the file are
// returned as Errors, each with its line and column. An empty file gives the defaults.
func Load(path string) (*Config, error) {
	text, err := readFile(path)
	if err != nil {
		return nil, err
	}
	return Parse(path, text)
}

func readFile(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("config: cannot read %q: %w; `sluice init URL…` writes a first file", path, errors.Unwrap(err))
	}
	return text, nil
}

// Parse is Load for text that has already been read. name identifies the file in errors.
func Parse(name string, text []byte) (*Config, error) {
	var f errorList
	c := read(name, text, &f)
	c.fillDefaults()
	c.check(&f)
	return c, f.err()
}

// read is Parse without the checks, which follow when the environment and the flags have been applied:
// a required field, such as a token, may be set only there.
func read(name string, text []byte, f *errorList) *Config {
	c := Default()
	d := decoder{file: name, errs: f, origins: c.origins}
	if root := d.parse(text); root != nil {
		d.value(root, reflect.ValueOf(c).Elem(), "", "")
	}
	c.inputWarnings = append(c.inputWarnings, d.warnings...)
	return c
}

// decoder converts the syntax tree into a Config. The library's own decoder stops at the first error
// and does not keep the positions of values. This one reports every error with its position, and
// records positions for the checks that follow.
type decoder struct {
	file    string
	errs    *errorList
	origins map[string]origin
	values  int
	anchors map[string]ast.Node
	// warnings has one warning for each old name that the file uses.
	warnings []string
	warned   map[string]bool
}

// parse returns the root node, or nil if the file is empty or is not YAML.
func (d *decoder) parse(text []byte) (root ast.Node) {
	top := origin{file: d.file, line: 1, col: 1}
	if encoding := wideEncoding(text); encoding != "" {
		d.errs.add(top, "", "the file is %s; want UTF-8: iconv -f %s -t UTF-8 FILE converts it", encoding, encoding)
		return nil
	}
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // YAML 1.2, 5.2: a byte order mark may come first
	if len(text) > maxFile {
		d.errs.add(top, "", "the file has %d bytes; want at most %d", len(text), maxFile)
		return nil
	}
	if n := bytes.Count(text, []byte("[")) + bytes.Count(text, []byte("{")); n > maxBrackets {
		d.errs.add(top, "", "the file has %d opening brackets; want at most %d", n, maxBrackets)
		return nil
	}
	n := 0
	for line := range bytes.Lines(text) {
		if n++; len(line) > maxLine {
			d.errs.add(origin{file: d.file, line: n, col: 1}, "", "the line has %d bytes; want at most %d", len(line), maxLine)
			return nil
		}
	}
	defer func() {
		// A panic of the YAML library on unusual input must not end the process.
		if p := recover(); p != nil {
			d.errs.add(top, "", "the file is not YAML: %v", p)
			root = nil
		}
	}()
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		at, msg := top, err.Error()
		var se yaml.Error
		if errors.As(err, &se) {
			msg = se.GetMessage()
			if t := se.GetToken(); t != nil && t.Position != nil {
				at.line, at.col = max(t.Position.Line, 1), max(t.Position.Column, 1)
			}
		}
		if strings.HasPrefix(msg, "found character '\t'") {
			msg = "a tab cannot indent a line; want spaces"
		}
		d.errs.add(at, "", "the file is not YAML: %s%s", msg, excerpt(text, at.line, at.col))
		return nil
	}
	d.anchors = map[string]ast.Node{}
	for i, doc := range file.Docs {
		if doc.Body == nil {
			continue
		}
		if i > 0 && root != nil {
			d.errs.add(d.at(doc.Body), "", "a second YAML document begins here; want one")
			break
		}
		root = doc.Body
		ast.Walk(anchorsOf(d.anchors), root)
	}
	if root == nil || root.Type() == ast.CommentType || root.Type() == ast.NullType {
		return nil
	}
	return root
}

// wideEncoding returns the name of a text's encoding if it is UTF-16 or UTF-32, by its byte order mark
// or by its zero bytes, which text in UTF-8 does not have; "" otherwise.
func wideEncoding(text []byte) string {
	switch {
	case bytes.HasPrefix(text, []byte("\xff\xfe\x00\x00")), bytes.HasPrefix(text, []byte("\x00\x00\xfe\xff")):
		return "UTF-32"
	case bytes.HasPrefix(text, []byte("\xff\xfe")), bytes.HasPrefix(text, []byte("\xfe\xff")):
		return "UTF-16"
	case len(text) >= 4 && text[0] != 0 && text[1] == 0 && text[2] != 0 && text[3] == 0:
		return "UTF-16LE"
	case len(text) >= 4 && text[0] == 0 && text[1] != 0 && text[2] == 0 && text[3] != 0:
		return "UTF-16BE"
	}
	return ""
}

// maxExcerpt is the number of characters that excerpt shows of a line.
const maxExcerpt = 76

// excerpt returns a line of a file with a caret below the column, each on a line of its own. It hides
// the line if it may contain a secret: if it, or the line with the key that it continues, names one.
func excerpt(text []byte, line, col int) string {
	lines := bytes.Split(text, []byte("\n"))
	if line < 1 || line > len(lines) {
		return ""
	}
	for i := line - 1; i >= 0; i-- {
		if secretKey.Match(lines[i]) {
			return ""
		}
		if i < line-1 && bytes.ContainsRune(lines[i], ':') {
			break
		}
		if i == line-1 && bytes.ContainsRune(lines[i], ':') && !bytes.HasPrefix(lines[i], []byte(" ")) {
			break
		}
	}
	shown := []rune(strings.ToValidUTF8(strings.TrimRight(string(lines[line-1]), "\r"), "?"))
	for i, r := range shown {
		if r < ' ' || r == 0x7f {
			shown[i] = ' ' // the parser counts a tab as one column
		}
	}
	at := min(max(col-1, 0), len(shown))
	from := 0
	if at > maxExcerpt*3/4 {
		from = at - maxExcerpt*3/4
	}
	number := strconv.Itoa(line)
	return fmt.Sprintf("\n  %s | %s\n  %s | %s^", number, printable(string(shown[from:min(len(shown), from+maxExcerpt)])), strings.Repeat(" ", len(number)), strings.Repeat(" ", at-from))
}

// secretKey matches a line that names a field whose value may be a secret.
var secretKey = regexp.MustCompile(`(?i)(token|secret|password|sha256|key)["']?\s*:`)

type anchorsOf map[string]ast.Node

// Visit implements ast.Visitor.
func (m anchorsOf) Visit(n ast.Node) ast.Visitor {
	if a, ok := n.(*ast.AnchorNode); ok {
		m[a.Name.String()] = a.Value
	}
	return m
}

func (d *decoder) at(n ast.Node) origin {
	o := origin{file: d.file, line: 1, col: 1}
	for n != nil {
		// The token of a mapping is its first colon; report the place of its first key.
		if m, ok := n.(*ast.MappingNode); ok && len(m.Values) > 0 && !m.IsFlowStyle {
			n = m.Values[0].Key
			continue
		}
		if m, ok := n.(*ast.MappingValueNode); ok {
			n = m.Key
			continue
		}
		if t := n.GetToken(); t != nil && t.Position != nil {
			o.line, o.col = max(t.Position.Line, 1), max(t.Position.Column, 1)
		}
		break
	}
	return o
}

// resolve replaces anchors, aliases and tags by the nodes that they denote.
func (d *decoder) resolve(n ast.Node) ast.Node {
	for range 32 {
		switch x := n.(type) {
		case *ast.AnchorNode:
			n = x.Value
		case *ast.TagNode:
			n = x.Value
		case *ast.AliasNode:
			target, ok := d.anchors[x.Value.String()]
			if !ok {
				d.errs.add(d.at(n), "", "the alias %s names no anchor", quoted("*"+x.Value.String()))
				return nil
			}
			n = target
		default:
			return n
		}
	}
	d.errs.add(d.at(n), "", "the aliases form a cycle")
	return nil
}

// value decodes a node into v. path names the field in errors.
func (d *decoder) value(n ast.Node, v reflect.Value, path string, tag reflect.StructTag) {
	at := d.at(n)
	if d.values++; d.values > maxValues {
		if d.values == maxValues+1 {
			d.errs.add(at, path, "the file expands to more than %d values; want fewer aliases", maxValues)
		}
		return
	}
	if n = d.resolve(n); n == nil {
		return
	}
	if path != "" {
		d.origins[path] = at
	}
	if _, null := n.(*ast.NullNode); null && tag.Get("yaml") != "" {
		return // "limits:" with everything below commented out keeps the defaults
	}
	switch {
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem(), path, tag)
	case v.Kind() == reflect.Struct:
		d.structure(n, v, path, at)
	case v.Kind() == reflect.Map:
		d.mapping(n, v, path, at)
	case v.Kind() == reflect.Slice:
		d.list(n, v, path, tag, at)
	default:
		text, ok := scalarText(n)
		if !ok {
			d.errs.add(at, path, "%s where one value is expected; want %s", kindOf(n), example(v, tag))
			return
		}
		if err := setScalar(v, tag, text); err != nil {
			d.errs.add(at, path, "%v", err)
		}
	}
}

func (d *decoder) structure(n ast.Node, v reflect.Value, path string, at origin) {
	known, names := fieldsOf(v.Type()), given{}
	for key, value := range d.entries(n, path, at) {
		sub := joinPath(path, key.name)
		f, ok := known.find(key.name)
		if old := known.findOld(key.name); !ok && old != nil {
			f, ok, sub = *old, true, joinPath(path, old.Tag.Get("yaml"))
			d.warnRenamed(v.Type(), key, joinPath(path, key.name), sub)
		}
		if _, conflicts := names.conflict(sub, key.name); ok && conflicts {
			d.errs.add(key.at, sub, "given as %s and by its old name %s; want only %s", f.Tag.Get("yaml"), f.Tag.Get("was"), f.Tag.Get("yaml"))
			continue
		}
		if !ok {
			d.errs.add(key.at, sub, "no such field%s", nearestOrAll(key.name, known.names(), "; want one of "))
			continue
		}
		d.value(value, v.FieldByIndex(f.Index), sub, f.Tag)
	}
}

// warnRenamed adds one warning for each old name of a struct's field.
func (d *decoder) warnRenamed(t reflect.Type, key yamlKey, old, present string) {
	if id := t.Name() + "." + key.name; !d.warned[id] {
		if d.warned == nil {
			d.warned = map[string]bool{}
		}
		d.warned[id] = true
		d.warnings = append(d.warnings, renamedWarning(key.at.String(), old, present))
	}
}

func (d *decoder) mapping(n ast.Node, v reflect.Value, path string, at origin) {
	v.Set(reflect.MakeMap(v.Type()))
	for key, value := range d.entries(n, path, at) {
		elem := reflect.New(v.Type().Elem()).Elem()
		sub := joinPath(path, key.name)
		d.origins[sub] = key.at
		d.value(value, elem, sub, `yaml:"-"`)
		v.SetMapIndex(reflect.ValueOf(key.name), elem)
	}
}

func (d *decoder) list(n ast.Node, v reflect.Value, path string, tag reflect.StructTag, at origin) {
	elem := v.Type().Elem()
	seq, ok := n.(*ast.SequenceNode)
	switch {
	case ok && elem.Kind() == reflect.Uint16 && len(seq.Values) > 65536:
		d.errs.add(at, path, "%d ranks; want at most 65536", len(seq.Values))
		return
	case ok:
		v.Set(reflect.MakeSlice(v.Type(), len(seq.Values), len(seq.Values)))
		for i, item := range seq.Values {
			d.value(item, v.Index(i), path+"["+strconv.Itoa(i)+"]", "")
		}
		return
	case elem.Kind() == reflect.Struct:
		d.errs.add(at, path, "%s where a list is expected; want entries that begin with \"- \"", kindOf(n))
		return
	}
	// A single value is a list of one entry; ranks: 4 is a number of ranks, as in a flag.
	text, ok := scalarText(n)
	if !ok {
		d.errs.add(at, path, "%s where a list is expected; want [a, b] or one value", kindOf(n))
		return
	}
	if elem.Kind() == reflect.Uint16 {
		ranks, err := parseRanks(text)
		if err != nil {
			d.errs.add(at, path, "%v", err)
			return
		}
		v.Set(reflect.ValueOf(ranks))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	if err := setScalar(v.Index(0), tag, text); err != nil {
		d.errs.add(at, path, "%v", err)
	}
}

type yamlKey struct {
	name string
	at   origin
}

// entries iterates over the keys of a mapping and adds an error for any other node. It checks for
// duplicate keys, because the parser detects them only in some styles of mapping.
func (d *decoder) entries(n ast.Node, path string, at origin) func(yield func(yamlKey, ast.Node) bool) {
	return func(yield func(yamlKey, ast.Node) bool) {
		var values []*ast.MappingValueNode
		switch x := n.(type) {
		case *ast.MappingNode:
			values = x.Values
		case *ast.MappingValueNode:
			values = []*ast.MappingValueNode{x}
		default:
			d.errs.add(at, path, "%s where fields are expected; want name: value", kindOf(n))
			return
		}
		// Merged fields come first, so that the mapping's own fields take precedence.
		for _, mv := range values {
			if !mv.Key.IsMergeKey() {
				continue
			}
			merged := d.resolve(mv.Value)
			if d.values++; merged == nil || d.values > maxValues {
				continue
			}
			for k, v := range d.entries(merged, path, d.at(mv.Key)) {
				if !yield(k, v) {
					return
				}
			}
		}
		seen := map[string]bool{}
		for _, mv := range values {
			key := yamlKey{at: d.at(mv.Key)}
			if mv.Key.IsMergeKey() {
				continue
			}
			text, ok := scalarText(mv.Key)
			if !ok {
				d.errs.add(key.at, path, "the name of a field is %s; want a word", kindOf(mv.Key))
				continue
			}
			if key.name = text; seen[text] {
				d.errs.add(key.at, joinPath(path, text), "the field is given twice")
				continue
			}
			seen[text] = true
			if !yield(key, mv.Value) {
				return
			}
		}
	}
}

func joinPath(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// scalarText returns the text of a scalar as it was written. It returns false for other nodes.
func scalarText(n ast.Node) (string, bool) {
	switch x := n.(type) {
	case *ast.StringNode:
		return x.Value, true
	case *ast.LiteralNode:
		return strings.TrimRight(x.Value.Value, "\n"), true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	case *ast.NullNode:
		return "", true
	}
	return "", false
}

func kindOf(n ast.Node) string {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a group of fields"
	case *ast.SequenceNode:
		return "a list"
	case *ast.NullNode:
		return "nothing"
	}
	if text, ok := scalarText(n); ok {
		return "the value " + quoted(text)
	}
	return "something else"
}

// example describes the values that a scalar field accepts.
func example(v reflect.Value, tag reflect.StructTag) string {
	switch {
	case v.Type() == durationType:
		return "a duration, such as 5s"
	case tag.Get("unit") == "bytes":
		return "a size, such as 32MiB"
	case tag.Get("oneof") != "":
		return strings.Join(strings.Fields(tag.Get("oneof")), ", ")
	case v.Kind() == reflect.Bool:
		return "true or false"
	case v.Kind() == reflect.String, v.Kind() == reflect.Uint8:
		return "a word"
	}
	return "a number"
}

// fields are the fields of a struct that can be set in a file.
type fields []reflect.StructField

func fieldsOf(t reflect.Type) fields {
	return slices.DeleteFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return f.Tag.Get("yaml") == "" })
}

func (fs fields) find(name string) (reflect.StructField, bool) {
	i := slices.IndexFunc(fs, func(f reflect.StructField) bool { return f.Tag.Get("yaml") == name })
	if i < 0 {
		return reflect.StructField{}, false
	}
	return fs[i], true
}

// findOld returns the field whose old name is name, or nil.
func (fs fields) findOld(name string) *reflect.StructField {
	i := slices.IndexFunc(fs, func(f reflect.StructField) bool { return f.Tag.Get("was") == name })
	if i < 0 {
		return nil
	}
	return &fs[i]
}

func (fs fields) names() []string {
	var names []string
	for _, f := range fs {
		names = append(names, f.Tag.Get("yaml"))
	}
	return names
}
