// Package harness contains the helpers that the system tests in router/e2e share. It starts
// simulated and scripted engines (StartSim, StartScripted), a whole router in the test process
// (StartRouter, Router) or a sluice process (Launch). It sends requests (Post, Get), and checks
// responses, metrics and that no load remains reserved (WantIdle).
//
// Only tests import it: the packages below router/e2e, one for each topic, and the tests of
// cmd/sluice. Unlike other packages of router/ it may import bench/, as tests may. It never
// contains assertions about a single topic; those belong to the topic's package.
package harness
