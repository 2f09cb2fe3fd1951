//go:build !linux

package main

import "errors"

func runFloor([]string) (err error) { return errors.New("engineapi: the floor is measured on Linux") }
