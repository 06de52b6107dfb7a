package rescue

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAPanicIsAnErrorAndIsToldOnce(t *testing.T) {
	told := make(chan string, 2)
	OnPanic(func(reason string) { told <- reason })
	ended := make(chan error, 1)
	Go(func() { ended <- Err(func() error { panic("lost") }) })
	require.EqualError(t, <-ended, "internal error: lost")
	require.Equal(t, "lost", <-told)
	Go(func() {
		defer close(ended)
		var none []int
		none[len(told)] = 1
	})
	<-ended
	require.NoError(t, Err(func() error { return nil }))
	require.ErrorIs(t, Err(func() error { return fs.ErrClosed }), fs.ErrClosed)
	require.NoError(t, Panicked(nil))
	require.Error(t, Panicked(errors.New("again")))
	require.Empty(t, told)
}

// sources parses the core's Go files that are not tests.
func sources(t *testing.T, visit func(name string, file *ast.File, position func(ast.Node) token.Position)) {
	files := token.NewFileSet()
	require.NoError(t, filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
			strings.Contains(path, "/simtest/") {
			return err
		}
		file, err := parser.ParseFile(files, path, nil, parser.ParseComments)
		if err == nil {
			visit(path, file, func(n ast.Node) token.Position { return files.Position(n.Pos()) })
		}
		return err
	}))
}

func TestEveryGoroutineOfTheCoreIsRescued(t *testing.T) {
	count := 0
	sources(t, func(name string, file *ast.File, position func(ast.Node) token.Position) {
		ast.Inspect(file, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				if f, ok := call.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Go" {
					count++
				}
			}
			if _, ok := n.(*ast.GoStmt); ok && filepath.Base(filepath.Dir(name)) != "rescue" {
				t.Errorf("%s: a panic here ends the program: use rescue.Go", position(n))
			}
			return true
		})
	})
	require.Greater(t, count, 10)
}

func TestEveryExportedFunctionRecovers(t *testing.T) {
	count := 0
	sources(t, func(_ string, file *ast.File, position func(ast.Node) token.Position) {
		for _, declared := range file.Decls {
			f, ok := declared.(*ast.FuncDecl)
			if !ok || f.Doc == nil || !strings.Contains(f.Doc.List[len(f.Doc.List)-1].Text, "//export ") {
				continue
			}
			count++
			if _, deferred := f.Body.List[0].(*ast.DeferStmt); !deferred {
				t.Errorf("%s: %s does not begin with a defer that recovers", position(f), f.Name.Name)
			}
		}
	})
	require.Greater(t, count, 30)
}
