package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"sluice/router/config"
)

const printDefaultsLong = `Prints a configuration file in which every field that has a default has it. Fields without a
default, such as workers and secrets, are not in it; docs/config.md lists all fields.

With --json the file is JSON, which "sluice serve --config" reads as well.`

const configSchemaLong = `Prints the JSON Schema (draft 2020-12) of the configuration file, with descriptions, defaults and
accepted values. An editor with yaml-language-server uses it for a file that begins with the line
# yaml-language-server: $schema=FILE`

func configCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "config", GroupID: groupConfigure, Short: "print the defaults and the schema of the configuration",
		Long:    "Prints the defaults or the JSON Schema of the configuration file.",
		Example: "  sluice config print-defaults\n  sluice config schema",
	}
	c.AddCommand(
		printDefaultsCommand(),
		printCommand(cobra.Command{
			Use: "schema", Short: "print the JSON Schema of the configuration file", Long: configSchemaLong,
			Example: "  sluice config schema > sluice.schema.json",
		}, func() (string, error) { return string(config.Schema()), nil }),
	)
	return c
}

func printDefaultsCommand() *cobra.Command {
	asJSON := false
	cmd := printCommand(cobra.Command{
		Use: "print-defaults", Short: "print a configuration file with all defaults", Long: printDefaultsLong,
		Example: "  sluice config print-defaults > sluice.yaml\n  sluice config print-defaults --json | jq .timeouts",
	}, func() (string, error) {
		if asJSON {
			return defaultsJSON()
		}
		return config.PrintDefaults(), nil
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// defaultsJSON returns config.PrintDefaults as JSON, without the comments.
func defaultsJSON() (string, error) {
	compact, err := yaml.YAMLToJSON([]byte(config.PrintDefaults()))
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, bytes.TrimSpace(compact), "", "  "); err != nil {
		return "", err
	}
	return out.String() + "\n", nil
}

// printCommand returns a command that prints a text.
func printCommand(c cobra.Command, text func() (string, error)) *cobra.Command {
	return newCommand(c, "0 printed, 1 not written", func(cmd *cobra.Command, _ []string) int {
		out, err := text()
		if err == nil {
			_, err = io.WriteString(cmd.OutOrStdout(), out)
		}
		if err != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: %v\n", cmd.CommandPath(), err)
			return 1
		}
		return 0
	})
}
