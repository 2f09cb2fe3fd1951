package config

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"sluice/router/worker"
)

type object = map[string]any

const (
	durationPattern = `^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+$`
	sizePattern     = `^[0-9]+(\.[0-9]+)? ?([kKmMgGtTpP][iI]?)?[bB]?$`
)

// schemaOf generates the JSON Schema from the types; comments maps "Struct.Field" to the comment in
// config.go.
type schemaOf struct {
	comments map[string]string
	defs     object
	defaults map[string]string // by path; only of the fixed part of the tree
}

func generateSchema(t *testing.T) []byte {
	t.Helper()
	g := schemaOf{comments: fieldComments(t), defs: object{}, defaults: map[string]string{}}
	forEachField(reflect.ValueOf(Default()).Elem(), "", func(path string, v reflect.Value, tag reflect.StructTag) {
		if tag.Get("secret") == "" && (v.Kind() != reflect.String || v.Len() > 0) && v.Kind() != reflect.Slice && path != "pd.family" {
			g.defaults[path] = scalarYAML(v, tag)
		}
	})
	root := g.structure(reflect.TypeFor[Config](), "")
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["title"] = "Configuration of Sluice"
	root["$defs"] = g.defs
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(root); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// fieldComments returns the comments of the struct fields in config.go, without the Go name.
func fieldComments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	comments := map[string]string{}
	for _, decl := range file.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range group.Specs {
			ts, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			st, ok := ts.Type.(*ast.StructType)
			if !ok {
				continue
			}
			comments[ts.Name.Name] = strings.Join(strings.Fields(group.Doc.Text()), " ")
			for _, verb := range []string{" is ", " are "} {
				comments[ts.Name.Name] = strings.TrimPrefix(comments[ts.Name.Name], ts.Name.Name+verb)
			}
			for _, f := range st.Fields.List {
				text := f.Comment.Text()
				if f.Doc != nil && len(f.Names) > 0 {
					text = withoutName(strings.TrimSpace(f.Doc.Text()), f.Names[0].Name)
				}
				for _, name := range f.Names {
					comments[ts.Name.Name+"."+name.Name] = strings.Join(strings.Fields(text), " ")
				}
			}
		}
	}
	return comments
}

// structure returns the schema of a struct's fields. Former names of fields are deprecated properties.
func (g *schemaOf) structure(t reflect.Type, path string) object {
	properties := object{}
	for _, f := range fieldsOf(t) {
		name := f.Tag.Get("yaml")
		p := g.value(f.Type, f.Tag, joinPath(path, name))
		description := g.comments[t.Name()+"."+f.Name]
		if t == reflect.TypeFor[Worker]() {
			description = workerFieldDescription(name)
		}
		if description == "" && f.Type.Kind() == reflect.Struct {
			description = g.comments[f.Type.Name()]
		}
		if description != "" {
			p["description"] = description
		}
		if d, ok := g.defaults[joinPath(path, name)]; ok {
			p["default"] = jsonDefault(f.Type, f.Tag, d)
		}
		if f.Tag.Get("secret") != "" {
			p["writeOnly"] = true
		}
		properties[name] = p
		if was := f.Tag.Get("was"); was != "" {
			old := object{"deprecated": true, "description": "Deprecated name of " + name + "."}
			for k, v := range p {
				if k != "description" && k != "default" {
					old[k] = v
				}
			}
			properties[was] = old
		}
	}
	return object{"type": []string{"object", "null"}, "additionalProperties": false, "properties": properties}
}

func workerFieldDescription(name string) string {
	for _, k := range workerKeys {
		if k.name == name || k.name+"s" == name {
			return k.doc
		}
	}
	return map[string]string{"url": "URL of the worker, http://HOST:PORT", "role": "prefill, decode or aggregated [aggregated]",
		"options": "options of the family of pd"}[name]
}

func jsonDefault(t reflect.Type, tag reflect.StructTag, text string) any {
	if t != durationType && tag.Get("unit") != "bytes" {
		switch t.Kind() {
		case reflect.Bool:
			return text == "true"
		case reflect.Int, reflect.Int64, reflect.Float64:
			return json.Number(text)
		}
	}
	return text
}

func (g *schemaOf) value(t reflect.Type, tag reflect.StructTag, path string) object {
	switch {
	case t == durationType:
		any := []object{{"type": "string", "pattern": durationPattern}, {"const": 0}, {"type": "null"}}
		if tag.Get("off") != "" {
			any = append(any, object{"const": "off"})
		}
		if tag.Get("bare") != "" {
			any = append(any, object{"type": "integer", "minimum": 0})
		}
		return object{"anyOf": any, "examples": []string{"500ms", "5s", "2m"}}
	case tag.Get("unit") == "bytes":
		return object{"anyOf": []object{{"type": "integer", "minimum": 0}, {"type": "string", "pattern": sizePattern}, {"type": "null"}}, "examples": []string{"64KiB", "32MiB", "1GiB"}}
	case t == reflect.TypeFor[worker.Role]():
		return object{"enum": []string{"prefill", "decode", "aggregated"}}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return g.value(t.Elem(), tag, path)
	case reflect.Struct:
		if _, done := g.defs[t.Name()]; !done {
			g.defs[t.Name()] = nil // a type that contains itself would not end
			if t == reflect.TypeFor[Worker]() || path == "" || strings.ContainsAny(path, "[{") {
				path = "[]" // no defaults below: the values are of many entries
			}
			g.defs[t.Name()] = g.structure(t, path)
		}
		return object{"$ref": "#/$defs/" + t.Name()}
	case reflect.Map:
		if t == reflect.TypeFor[map[string][]string]() { // options of a worker
			properties := object{}
			for _, key := range OptionKeys() {
				properties[key] = g.value(t.Elem(), tag, path+"{}")
			}
			return object{"type": []string{"object", "null"}, "additionalProperties": false, "properties": properties}
		}
		return object{"type": []string{"object", "null"}, "additionalProperties": g.value(t.Elem(), tag, path+"{}")}
	case reflect.Slice:
		item := g.value(t.Elem(), tag, path+"[]")
		list := object{"type": "array", "items": item}
		switch t.Elem().Kind() {
		case reflect.Struct:
			return object{"type": []string{"array", "null"}, "items": item}
		case reflect.Uint16:
			return object{"anyOf": []object{list, {"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}}}
		}
		return object{"anyOf": []object{list, item, {"type": "null"}}}
	case reflect.Bool:
		return object{"anyOf": []object{{"type": "boolean"}, {"enum": []any{"yes", "no", "on", "off", nil}}}}
	case reflect.String:
		words := strings.Fields(tag.Get("oneof"))
		if path == "pd.family" || strings.HasSuffix(path, ".family") || path == "[].family" {
			words = Families()
		}
		if len(words) == 0 {
			return object{"type": []string{"string", "number", "boolean", "null"}} // any scalar is read as text
		}
		enum := []any{}
		for _, w := range words {
			enum = append(enum, w)
			if n, err := strconv.ParseFloat(w, 64); err == nil {
				enum = append(enum, n)
			}
		}
		return object{"enum": append(enum, nil)}
	}
	kind := "integer"
	if t.Kind() == reflect.Float64 {
		kind = "number"
	}
	p := object{"type": []string{kind, "null"}}
	if lo := tag.Get("min"); lo != "" {
		p["minimum"] = json.Number(lo)
	}
	if hi := tag.Get("max"); hi != "" {
		p["maximum"] = json.Number(hi)
	}
	if t.Kind() == reflect.Uint16 {
		p["type"], p["minimum"], p["maximum"] = "integer", 0, 65535
	}
	return p
}

// TestDocsSchema compares schema.json with the types; -rewrite writes it.
func TestDocsSchema(t *testing.T) {
	text := generateSchema(t)
	if *rewrite {
		if err := os.WriteFile("schema.json", text, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(text, schema) {
		t.Error("schema.json is out of date; run: go test ./router/config -run TestDocs -rewrite")
	}
	var missing []string
	walk := func(path string, s object) {
		for name, p := range s["properties"].(object) {
			if p := p.(object); p["description"] == nil {
				missing = append(missing, path+name)
			}
		}
	}
	var root object
	if err := json.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	walk("", root)
	for name, def := range root["$defs"].(object) {
		walk(name+".", def.(object))
	}
	if len(missing) > 0 {
		t.Errorf("no description of %v", missing)
	}
}

// TestSchemaValidates: the schema accepts the files that the parser accepts, and refuses misspelt names
// and values with a wrong type.
func TestSchemaValidates(t *testing.T) {
	compiler := jsonschema.NewCompiler()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	if err := compiler.AddResource("sluice.json", doc); err != nil {
		t.Fatal(err)
	}
	compiled, err := compiler.Compile("sluice.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(text string) error {
		var v any
		if err := yaml.Unmarshal([]byte(text), &v); err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		inst, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		return compiled.Validate(inst)
	}
	good := []string{PrintDefaults(), "listen: 127.0.0.1:0", "limits:\n", "timeouts: {drain: 90s, prefill: 1.5m}", "tls: {min_version: 1.3}", "health: {metrics_interval: off}",
		"limits: {max_body: 33554432}", "register: {token: abc}", "workers: [{url: 'http://h:1', ranks: 4, kv_events: auto, options: {bootstrap_port: 8998}}]",
		"models: {m: {pd: {family: off}}}"}
	packaged, err := os.ReadFile("../../scripts/packaging/sluice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	good = append(good, string(packaged))
	pages, _ := filepath.Glob("../../docs/*.md")
	blocks := 0
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("(?s)\n```yaml\n(.*?)\n```").FindAllStringSubmatch(string(text), -1) {
			if c, err := Parse(page, []byte(m[1])); c != nil && (err == nil || !strings.Contains(err.Error(), "no such field") && !strings.Contains(err.Error(), "not YAML")) {
				good = append(good, m[1])
				blocks++
			}
		}
	}
	if blocks < 10 {
		t.Errorf("only %d configurations in the documents", blocks)
	}
	for _, text := range good {
		if err := validate(text); err != nil {
			t.Errorf("%v of\n%s", err, text)
		}
	}
	for _, bad := range []string{"listn: x", "timeouts: {prefil: 3s}", "timeouts: {prefill: soon}", "log: {level: loud}", "limits: {max_depth: 1025}", "limits: {max_body: much}",
		"workers: [{url: 'http://h:1', rank: 4}]", "workers: [{url: 'http://h:1', role: both}]", "workers: [{url: 'http://h:1', options: {port: 1}}]",
		"models: {m: {pd: {famly: off}}}", "pd: {family: nixll}", "limits: []"} {
		if validate(bad) == nil {
			t.Errorf("the schema accepts %s", bad)
		}
	}
}

// TestPrintDefaults: the printed file is the defaults.
func TestPrintDefaults(t *testing.T) {
	c, err := Parse("defaults", []byte(PrintDefaults()))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.fillDefaults()
	c.origins, want.origins = nil, nil
	if !reflect.DeepEqual(c, want) {
		t.Errorf("%+v\nwant\n%+v", c, want)
	}
}
