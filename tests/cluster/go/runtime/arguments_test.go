package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// The first four are of the forms that containerd 1.6 uses.
func TestCommandLines(t *testing.T) {
	for _, example := range []struct {
		name      string
		arguments []string
		want      call
		creates   bool
	}{
		{
			"create",
			[]string{
				"--root", "/r", "--log", "/b/log.json", "--log-format", "json",
				"create", "--bundle", "/b", "--pid-file", "/b/p", "ID",
			},
			call{"create", "/b", "/b/log.json", "json"}, true,
		},
		{"start", []string{"--root", "/r", "--log", "l", "--log-format", "json", "start", "create"}, call{"start", ".", "l", "json"}, false},
		{"exec", []string{"--root", "/r", "exec", "--process", "/p", "--detach", "ID"}, call{"exec", ".", "", ""}, false},
		{"version", []string{"--version"}, call{"", ".", "", ""}, false},
		{"a value that is a verb", []string{"--root", "create", "state", "ID"}, call{"state", ".", "", ""}, false},
		{"joined values", []string{"-log=/l", "run", "-b=/b", "ID"}, call{"run", "/b", "/l", ""}, true},
		{"the current folder", []string{"--systemd-cgroup", "create", "ID"}, call{"create", ".", "", ""}, true},
		{"nothing", nil, call{"", ".", "", ""}, false},
	} {
		got := parse(example.arguments)
		if got != example.want || got.creates() != example.creates {
			t.Errorf("%s: got %+v (creates: %v), want %+v", example.name, got, got.creates(), example.want)
		}
	}
}

// containerd reads the last line of level "error" and shows its message.
func TestAnErrorIsReportedWhereContainerdReadsIt(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log.json")
	call{log: log, logFormat: "json"}.report(errors.New(`no GPU "9"`))
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	entry := struct{ Level, Msg string }{}
	if err := json.Unmarshal(text, &entry); err != nil || entry.Level != "error" || entry.Msg != `no GPU "9"` {
		t.Fatalf("got %q, %v", text, err)
	}
}

// A copy or a link of this program called runc must not be started for ever.
func TestRuncIsNeverThisProgram(t *testing.T) {
	folder := t.TempDir()
	own, other := filepath.Join(folder, "own"), filepath.Join(folder, "other")
	self, runc := filepath.Join(folder, "nvidia-container-runtime"), filepath.Join(other, "runc")
	for _, path := range []string{own, other} {
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{self, runc} {
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(self, filepath.Join(own, "runc")); err != nil {
		t.Fatal(err)
	}
	if found, err := findRunc([]string{own, other}, self); err != nil || found != runc {
		t.Fatalf("got %s, %v", found, err)
	}
	if found, err := findRunc([]string{own}, self); err == nil {
		t.Fatalf("got %s and no error", found)
	}
}
