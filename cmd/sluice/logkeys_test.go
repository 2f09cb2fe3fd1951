package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// logKeys are the keys of log records. One idea has one key: a log is searched by them. error is
// what went wrong, reason why the router acted, hint what the operator can do; request is the
// X-Request-Id, client the address of the other side of an accepted connection, address a
// listener's own, peer the other side of a connection that the router made or of a ZMQ socket;
// worker is the id of a worker, rank that of a rank (WORKER/RANK).
var logKeys = strings.Fields(`
	error reason hint detail cause kind status state previous_state warning panic stack evidence
	request client key endpoint param model models leg attempt worker workers rank ranks previous_rank role source
	address peer host url file socket tier engine_id pid driver threads agent code
	deadline delay duration expires since retry_in start_timeout idle_timeout lease
	added changed removed unchanged after_requests adapters bind blocks bytes ca calls cert connections
	draining expected_sequence failures fields invalid min_workers ready requests sequence stores streams
	suppressed tokens unconstrained path old new effect
`)

var loggerName = regexp.MustCompile(`(?i)log(ger)?$`)

// TestLogKeys keeps the keys of log records to one set, so that one idea has one key in all
// packages.
func TestLogKeys(t *testing.T) {
	allowed, used := map[string]bool{}, map[string]bool{}
	for _, k := range logKeys {
		allowed[k] = true
	}
	calls := 0
	forEachGoFile(t, func(path string, _ []string) {
		if strings.HasSuffix(path, "_test.go") || strings.HasPrefix(path, "router/e2e/") {
			return
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, filepath.Join(repositoryRoot, path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			keys, ok := logArguments(n)
			if !ok {
				return true
			}
			calls++
			for i := 0; i < len(keys); i += 2 {
				literal, ok := keys[i].(*ast.BasicLit)
				if !ok { // a name, checked where its value is written
					continue
				}
				key, _ := strconv.Unquote(literal.Value)
				if used[key] = true; !allowed[key] {
					t.Errorf("%s: the log key %q is not in logKeys; use one that is, or add it there", files.Position(literal.Pos()), key)
				}
			}
			return true
		})
	})
	if calls < 100 {
		t.Errorf("only %d log calls were found", calls)
	}
	for _, k := range logKeys {
		if !used[k] && k != "param" { // param: by name in front/refusallog.go
			t.Errorf("no log call uses the key %q; remove it from logKeys", k)
		}
	}
}

// logArguments returns the keys and values of a log call, or of an assignment or an append to the
// slice args that collects them.
func logArguments(n ast.Node) (keys []ast.Expr, ok bool) {
	if assign, isAssign := n.(*ast.AssignStmt); isAssign && len(assign.Lhs) == 1 && lastName(assign.Lhs[0]) == "args" {
		list, isList := assign.Rhs[0].(*ast.CompositeLit)
		if !isList || !isAnySlice(list.Type) {
			return nil, false
		}
		return list.Elts, true
	}
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return nil, false
	}
	switch fn := call.Fun.(type) {
	case *ast.SelectorExpr:
		skip, method := 0, fn.Sel.Name
		switch {
		case method == "warn" && len(call.Args) > 1 && loggerName.MatchString(lastName(call.Args[0])): // a rate limit around a logger
			skip = 2
		case method == "log" && len(call.Args) > 2 && loggerName.MatchString(lastName(call.Args[0])):
			skip = 3
		case !loggerName.MatchString(lastName(fn.X)):
			return nil, false
		case method == "Debug" || method == "Info" || method == "Warn" || method == "Error":
			skip = 1
		case method == "With":
		case method == "Log":
			skip = 3
		default:
			return nil, false
		}
		if len(call.Args) < skip {
			return nil, false
		}
		return call.Args[skip:], true
	case *ast.Ident:
		if fn.Name != "append" || len(call.Args) < 3 || lastName(call.Args[0]) != "args" && lastName(call.Args[0]) != "make" {
			return nil, false
		}
		if l, isLiteral := call.Args[1].(*ast.BasicLit); isLiteral && strings.HasPrefix(l.Value, `"-`) {
			return nil, false // arguments of a command
		}
		return call.Args[1:], true
	}
	return nil, false
}

// isAnySlice reports whether a type is []any.
func isAnySlice(e ast.Expr) bool {
	list, ok := e.(*ast.ArrayType)
	return ok && list.Len == nil && lastName(list.Elt) == "any"
}

// lastName returns the last identifier of a name, a selector or a call.
func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.CallExpr:
		return lastName(e.Fun)
	}
	return ""
}
