package kube

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/worker"
)

// store keeps each pod's worker. Each change goes to the Set at once. It belongs to the source's
// goroutine.
type store struct {
	conf *config.Kube
	all  bool // all namespaces are watched, so pod names are not unique
	set  *discovery.Set
	pods map[string]podWorker
}

// podWorker is the result of one pod: a ready worker, or the reason why the pod cannot be one.
// Without either, the pod is not ready.
type podWorker struct {
	spec  worker.Spec
	ready bool
	fault error
}

func newStore(conf *config.Kube, all bool, set *discovery.Set) *store {
	return &store{conf: conf, all: all, set: set, pods: map[string]podWorker{}}
}

// apply applies one event of the watch.
func (s *store) apply(kind string, p *pod) {
	switch kind {
	case "ADDED", "MODIFIED":
		s.pods[p.key()] = s.read(p)
	case "DELETED":
		delete(s.pods, p.key())
	default:
		return
	}
	s.push()
}

// replace applies a complete list.
func (s *store) replace(pods []pod) {
	clear(s.pods)
	for i := range pods {
		s.pods[pods[i].key()] = s.read(&pods[i])
	}
	s.push()
}

// clearError clears a reported failure of the source, after the API server has answered a watch, which
// follows a complete list.
func (s *store) clearError() {
	if s.set.State().Error != "" {
		s.push()
	}
}

// push applies the ready workers to the Set.
func (s *store) push() {
	var specs []worker.Spec
	var fault error
	faults := 0
	for _, key := range slices.Sorted(maps.Keys(s.pods)) {
		switch f := s.pods[key]; {
		case f.ready:
			specs = append(specs, f.spec)
		case f.fault != nil:
			if faults++; faults == 1 {
				fault = f.fault
			}
		}
	}
	if faults > 1 {
		fault = fmt.Errorf("%w; and %d other pods cannot be workers", fault, faults-1)
	}
	s.set.ReplaceExcept(specs, fault)
}

// read returns the worker of a pod. Only a pod that is ready and not being deleted becomes a
// worker: Kubernetes probes its pods itself, and a terminating pod must get no new requests.
func (s *store) read(p *pod) podWorker {
	if p.Metadata.DeletionTimestamp != nil || p.Status.PodIP == "" || p.Status.Phase != "Running" || !ready(p) {
		return podWorker{}
	}
	port, err := s.port(p)
	if err != nil {
		return podWorker{fault: err}
	}
	var w config.Worker
	if s.conf.Worker != nil {
		w = *s.conf.Worker
	}
	w.ID = p.Metadata.Name
	if s.all {
		w.ID = p.Metadata.Namespace + "." + p.Metadata.Name
	}
	host := p.Status.PodIP
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	w.URL = s.conf.Scheme + "://" + host + ":" + port
	switch value := p.Metadata.Labels[s.conf.RoleLabel]; {
	case slices.Contains(s.conf.PrefillValues, value):
		w.Role = worker.Prefill
	case slices.Contains(s.conf.DecodeValues, value):
		w.Role = worker.Decode
	default:
		w.Role = worker.Aggregated
	}
	// A label's value cannot contain every model's name (it allows no slash); an annotation can.
	if key := s.conf.ModelLabel; key != "" {
		for _, from := range []map[string]string{p.Metadata.Labels, p.Metadata.Annotations} {
			if model := from[key]; model != "" {
				w.Models = []string{model}
				break
			}
		}
	}
	return podWorker{spec: w.Spec("kube"), ready: true}
}

func ready(p *pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// port returns the configured port number, or the number of the container port with the configured
// name.
func (s *store) port(p *pod) (string, error) {
	if _, err := strconv.ParseUint(s.conf.Port, 10, 16); err == nil {
		return s.conf.Port, nil
	}
	for _, c := range p.Spec.Containers {
		for _, cp := range c.Ports {
			if cp.Name == s.conf.Port {
				return strconv.Itoa(cp.ContainerPort), nil
			}
		}
	}
	return "", fmt.Errorf("kube: the pod %s/%s has no container port named %q (kube.port)", p.Metadata.Namespace, p.Metadata.Name, s.conf.Port)
}
