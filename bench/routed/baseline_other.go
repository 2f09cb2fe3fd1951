//go:build !linux

package main

import "errors"

func runFloor([]string) (err error) { return errors.New("routed: the floor is measured on Linux") }
