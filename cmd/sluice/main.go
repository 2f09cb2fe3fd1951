// Command sluice is the data plane in front of disaggregated LLM engines.
package main

func main() {}
