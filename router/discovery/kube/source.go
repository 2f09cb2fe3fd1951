package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"sluice/router/config"
	"sluice/router/discovery"
)

// Source watches the pods of one selector.
type Source struct {
	conf      config.Kube
	namespace string // "" for all
	pods      *gentype.ClientWithList[*corev1.Pod, *corev1.PodList]
}

// listTimeout bounds one list; a watch has the server's own.
const listTimeout = 30 * time.Second

// namespaceFile is where a pod finds its own namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// New reads the credentials, of a kubeconfig or of the pod that the router runs
// in. It calls nobody: a cluster that is away is Run's to report.
func New(conf config.Kube) (*Source, error) {
	s := &Source{conf: conf, namespace: conf.Namespace}
	if _, err := labels.Parse(conf.Selector); err != nil {
		return nil, fmt.Errorf("kube: cannot use kube.selector %q: %w; want one as kubectl -l takes, such as app in (prefill,decode)", conf.Selector, err)
	}
	rc, own, err := credentials(conf.Kubeconfig)
	if err != nil {
		return nil, err
	}
	switch s.namespace {
	case "*":
		s.namespace = metav1.NamespaceAll
	case "":
		s.namespace = own
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	rc.APIPath, rc.GroupVersion = "/api", &corev1.SchemeGroupVersion
	rc.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	rc.UserAgent = "sluice"
	silence()
	client, err := rest.RESTClientFor(rc)
	if err != nil {
		return nil, fmt.Errorf("kube: cannot use the credentials: %w", err)
	}
	s.pods = gentype.NewClientWithList("pods", client, runtime.NewParameterCodec(scheme), s.namespace,
		func() *corev1.Pod { return new(corev1.Pod) }, func() *corev1.PodList { return new(corev1.PodList) })
	return s, nil
}

// silence ends the client's log, which says nothing that Run does not report to the Set.
// The log is the process's, and sources that run read it: so it is set once.
var silence = sync.OnceFunc(func() { klog.SetSlogLogger(slog.New(slog.DiscardHandler)) })

func credentials(kubeconfig string) (rc *rest.Config, namespace string, err error) {
	if kubeconfig != "" {
		loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}, &clientcmd.ConfigOverrides{})
		if rc, err = loader.ClientConfig(); err == nil {
			namespace, _, err = loader.Namespace()
		}
		if err != nil {
			return nil, "", fmt.Errorf("kube: cannot use kube.kubeconfig %q: %w", kubeconfig, err)
		}
		return rc, namespace, nil
	}
	if rc, err = rest.InClusterConfig(); err != nil {
		return nil, "", fmt.Errorf("kube: cannot find the pod's service account: %w; outside a cluster want kube.kubeconfig", err)
	}
	text, err := os.ReadFile(namespaceFile)
	if err != nil {
		return nil, "", fmt.Errorf("kube: cannot tell the pod's namespace: %w; want kube.namespace", err)
	}
	return rc, strings.TrimSpace(string(text)), nil
}

// Name implements discovery.Source.
func (s *Source) Name() string { return "kube " + s.conf.Selector }

// Run lists and watches until ctx ends. The reflector relists when the server
// has forgotten where a watch stood (410 Gone), and backs off while it fails.
func (s *Source) Run(ctx context.Context, set *discovery.Set) error {
	st := newStore(&s.conf, s.namespace == metav1.NamespaceAll, set)
	r := cache.NewReflectorWithOptions(s.listWatch(st), &corev1.Pod{}, st, cache.ReflectorOptions{Name: "sluice", TypeDescription: "pods"})
	r.RunWithContext(ctx)
	return nil
}

// listWatch asks for the pods, and tells st of what fails and of what goes well
// again: the reflector itself only tries on.
func (s *Source) listWatch(st *store) *cache.ListWatch {
	report := func(what string, err error) {
		switch {
		case err == nil:
			st.wellAgain()
		case !errors.Is(err, context.Canceled):
			st.set.Failed(fmt.Errorf("kube: cannot %s pods with %s: %w", what, s.conf.Selector, err))
		}
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeout(ctx, listTimeout)
			defer cancel()
			o.LabelSelector = s.conf.Selector
			pods, err := s.pods.List(ctx, o)
			if err != nil {
				report("list", err)
			}
			return pods, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = s.conf.Selector
			w, err := s.pods.Watch(ctx, o)
			if err != nil && isUnknown(err) {
				return nil, err // an older server that cannot stream a list: it is listed instead
			}
			report("watch", err)
			return w, err
		},
	}
}

// isUnknown says whether a server refused the request's form, not its sender.
func isUnknown(err error) bool {
	var status interface{ Status() metav1.Status }
	return errors.As(err, &status) && (status.Status().Code == http.StatusUnprocessableEntity || status.Status().Code == http.StatusBadRequest)
}
