package kube

import (
	"encoding/json"
	"regexp"
)

// pod is what the source reads of a Kubernetes pod.
type pod struct {
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		ResourceVersion   string            `json:"resourceVersion"`
		Labels            map[string]string `json:"labels"`
		Annotations       map[string]string `json:"annotations"`
		DeletionTimestamp *string           `json:"deletionTimestamp"` // set while the pod terminates
	} `json:"metadata"`
	Spec struct {
		Containers []struct {
			Ports []struct {
				Name          string `json:"name"`
				ContainerPort int    `json:"containerPort"`
			} `json:"ports"`
		} `json:"containers"`
	} `json:"spec"`
	Status struct {
		Phase      string `json:"phase"`
		PodIP      string `json:"podIP"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
	} `json:"status"`
}

func (p *pod) key() string { return p.Metadata.Namespace + "/" + p.Metadata.Name }

// podList is one page of a list.
type podList struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
		Continue        string `json:"continue"`
	} `json:"metadata"`
	Items []pod `json:"items"`
}

// event is one event of a watch. Object is a pod, or a status if Type is ERROR.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// status is the API server's description of a failure.
type status struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// selectorForm is the form of a label selector. The lengths of names and values are the server's to
// check.
var selectorForm = func() *regexp.Regexp {
	const name, value = `[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?`, `(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?`
	const list = `\(\s*` + value + `\s*(?:,\s*` + value + `\s*)*\)`
	const term = `(?:!\s*` + name + `|` + name + `(?:\s*(?:==?|!=)\s*` + value + `|\s*[<>]\s*-?[0-9]+|\s+(?:in|notin)\s*` + list + `)?)`
	return regexp.MustCompile(`^\s*` + term + `\s*(?:,\s*` + term + `\s*)*$`)
}()
