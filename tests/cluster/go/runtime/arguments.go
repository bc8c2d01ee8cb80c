package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// valued are the flags of runc 1.1, global ones and those of create and run, whose value may be the next argument.
var valued = map[string]bool{
	"root": true, "log": true, "log-format": true, "criu": true, "rootless": true,
	"bundle": true, "b": true, "console-socket": true, "pid-file": true, "preserve-fds": true,
}

// call is what the runtime needs to know of runc's command line.
type call struct {
	verb, bundle, log, logFormat string
}

func parse(arguments []string) call {
	values := map[string]string{}
	verb := ""
	for i := 0; i < len(arguments); i++ {
		argument := arguments[i]
		name, value, inline := strings.Cut(strings.TrimLeft(argument, "-"), "=")
		isFlag := strings.HasPrefix(argument, "-")
		switch {
		case isFlag && inline:
			values[name] = value
		case isFlag && valued[name] && i+1 < len(arguments):
			i++
			values[name] = arguments[i]
		case !isFlag && verb == "":
			verb = argument
		}
	}
	bundle := values["bundle"] + values["b"]
	if bundle == "" {
		bundle = "."
	}
	return call{verb: verb, bundle: bundle, log: values["log"], logFormat: values["log-format"]}
}

func (c call) creates() bool {
	return c.verb == "create" || c.verb == "run"
}

// report writes an error where runc would: containerd shows the last error of this file as the pod's event.
func (c call) report(cause error) {
	if c.log == "" {
		return
	}
	line := fmt.Sprintf("level=error msg=%q\n", cause)
	if c.logFormat == "json" {
		entry := map[string]string{"level": "error", "msg": cause.Error(), "time": time.Now().Format(time.RFC3339)}
		text, _ := json.Marshal(entry) // strings only: cannot fail
		line = string(text) + "\n"
	}
	file, err := os.OpenFile(c.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err == nil {
		_, err = file.WriteString(line)
		_ = file.Close()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: cannot write: %v\n", c.log, err)
	}
}
