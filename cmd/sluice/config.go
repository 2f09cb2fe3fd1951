package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"sluice/router/config"
)

const printDefaultsLong = `Prints a configuration file in which every field that has a default has it. Fields without a
default, such as workers and secrets, are not in it; docs/config.md lists all fields.`

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
		printCommand(cobra.Command{
			Use: "print-defaults", Short: "print a configuration file with all defaults", Long: printDefaultsLong,
			Example: "  sluice config print-defaults > sluice.yaml",
		}, func() string { return config.PrintDefaults() }),
		printCommand(cobra.Command{
			Use: "schema", Short: "print the JSON Schema of the configuration file", Long: configSchemaLong,
			Example: "  sluice config schema > sluice.schema.json",
		}, func() string { return string(config.Schema()) }),
	)
	return c
}

// printCommand returns a command that prints a text.
func printCommand(c cobra.Command, text func() string) *cobra.Command {
	return newCommand(c, "0 printed, 1 not written", func(cmd *cobra.Command, _ []string) int {
		if _, err := io.WriteString(cmd.OutOrStdout(), text()); err != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: %v\n", cmd.CommandPath(), err)
			return 1
		}
		return 0
	})
}
