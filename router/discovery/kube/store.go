package kube

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/worker"
)

// store receives the pods from the reflector. It keeps only each pod's worker, because pods are
// large objects. Each change goes to the Set at once.
type store struct {
	conf *config.Kube
	all  bool // all namespaces are watched, so pod names are not unique
	set  *discovery.Set

	mu     sync.Mutex
	pods   map[string]podWorker
	synced bool // Replace has been called: the list of pods is complete
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

// Add implements cache.ReflectorStore.
func (s *store) Add(obj any) error { return s.Update(obj) }

// Update implements cache.ReflectorStore.
func (s *store) Update(obj any) error {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("kube: a %T stands among the pods", obj)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[pod.Namespace+"/"+pod.Name] = s.read(pod)
	s.push()
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *store) Delete(obj any) error {
	key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, key)
	s.push()
	return nil
}

// Replace implements cache.ReflectorStore.
func (s *store) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.pods)
	for _, obj := range list {
		if pod, ok := obj.(*corev1.Pod); ok {
			s.pods[pod.Namespace+"/"+pod.Name] = s.read(pod)
		}
	}
	s.synced = true
	s.push()
	return nil
}

// Resync implements cache.ReflectorStore.
func (s *store) Resync() error { return nil }

// clearError clears a reported failure of the source, after the API server has answered again.
func (s *store) clearError() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced && s.set.State().Error != "" {
		s.push()
	}
}

// push applies the ready workers to the Set. The caller holds mu.
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
		fault = fmt.Errorf("%w; nor can %d other pods be workers", fault, faults-1)
	}
	s.set.ReplaceExcept(specs, fault)
}

// read returns the worker of a pod. Only a pod that is ready and not being deleted becomes a
// worker: Kubernetes probes its pods itself, and a terminating pod must get no new requests.
func (s *store) read(pod *corev1.Pod) podWorker {
	if pod.DeletionTimestamp != nil || pod.Status.PodIP == "" || pod.Status.Phase != corev1.PodRunning || !ready(pod) {
		return podWorker{}
	}
	port, err := s.port(pod)
	if err != nil {
		return podWorker{fault: err}
	}
	var w config.Worker
	if s.conf.Worker != nil {
		w = *s.conf.Worker
	}
	w.ID = pod.Name
	if s.all {
		w.ID = pod.Namespace + "." + pod.Name
	}
	host := pod.Status.PodIP
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	w.URL = s.conf.Scheme + "://" + host + ":" + port
	switch value := pod.Labels[s.conf.RoleLabel]; {
	case slices.Contains(s.conf.PrefillValues, value):
		w.Role = worker.Prefill
	case slices.Contains(s.conf.DecodeValues, value):
		w.Role = worker.Decode
	default:
		w.Role = worker.Aggregated
	}
	// A label's value cannot contain every model's name (it allows no slash); an annotation can.
	if key := s.conf.ModelLabel; key != "" {
		for _, from := range []map[string]string{pod.Labels, pod.Annotations} {
			if model := from[key]; model != "" {
				w.Models = []string{model}
				break
			}
		}
	}
	return podWorker{spec: w.Spec("kube"), ready: true}
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// port returns the configured port number, or the number of the container port with the configured
// name.
func (s *store) port(pod *corev1.Pod) (string, error) {
	if _, err := strconv.ParseUint(s.conf.Port, 10, 16); err == nil {
		return s.conf.Port, nil
	}
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Name == s.conf.Port {
				return strconv.Itoa(int(p.ContainerPort)), nil
			}
		}
	}
	return "", fmt.Errorf("kube: the pod %s/%s has no container port named %q (kube.port)", pod.Namespace, pod.Name, s.conf.Port)
}
