package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

const completionLong = `Prints a script that completes commands, flags and values in a shell. Names of workers are completed
if a router of this user runs. The packages install the scripts.`

const completionExample = `
  source <(sluice completion bash)                                        this shell
  sluice completion bash > /etc/bash_completion.d/sluice                  all bash shells
  sluice completion zsh > "${fpath[1]}/_sluice"                           zsh
  sluice completion fish > ~/.config/fish/completions/sluice.fish         fish`

var completionShells = []string{"bash", "zsh", "fish"}

func completionCommand() *cobra.Command {
	return newCommand(cobra.Command{
		Use: "completion bash|zsh|fish", GroupID: groupOther, Short: "print a completion script for a shell", Long: completionLong, Example: completionExample,
		ValidArgs: completionShells,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("want one shell: bash, zsh or fish")
			}
			return nil
		},
	}, "0 printed, 1 not written", func(cmd *cobra.Command, args []string) int {
		var err error
		switch root, w := cmd.Root(), cmd.OutOrStdout(); args[0] {
		case "bash":
			err = root.GenBashCompletionV2(w, true)
		case "zsh":
			err = root.GenZshCompletion(w)
		case "fish":
			err = root.GenFishCompletion(w, true)
		default:
			fmt.Fprintf(cmd.ErrOrStderr(), "sluice completion: no script for shell %q; want bash, zsh or fish\n", args[0])
			return 2
		}
		if err != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), "sluice completion:", err)
			return 1
		}
		return 0
	})
}
