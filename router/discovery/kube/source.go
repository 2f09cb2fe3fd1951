package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"sluice/router/config"
	"sluice/router/discovery"
)

// Source watches the pods of one selector.
type Source struct {
	conf            config.Kube
	namespace       string // "" for all
	server          string // URL of the API server, for errors
	pods            typedcorev1.PodInterface
	responseTimeout time.Duration // with a server that does not answer: then a list ends, and of a watch it is told
}

const (
	defaultResponseTimeout = 30 * time.Second
	// watchGrace is how much longer than it was asked for a watch may take: the server ends
	// it, and where it does not, there may be none at the other end any more.
	watchGrace = 30 * time.Second
)

// namespaceFile is where a pod finds its own namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// New reads the credentials, of a kubeconfig or of the pod that the router runs
// in. It calls nobody: a cluster that is away is Run's to report.
func New(conf config.Kube) (*Source, error) {
	s := &Source{conf: conf, namespace: conf.Namespace, responseTimeout: defaultResponseTimeout}
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
	rc.UserAgent = "sluice"
	silentLogger()
	var ok bool
	if s.server, ok = shown(rc.Host); !ok { // it may hold a password
		return nil, fmt.Errorf("kube: cannot use the API server's address of %s: it is no URL; want https://HOST:PORT", s.credentialsName())
	}
	client, err := typedcorev1.NewForConfig(rc)
	if err != nil {
		return nil, fmt.Errorf("kube: cannot use the credentials of %s: %w", s.credentialsName(), err)
	}
	s.pods = client.Pods(s.namespace)
	return s, nil
}

// silentLogger ends the client's log, which says nothing that Run does not report to the Set.
// The log is the process's, and sources that run read it: so it is set once.
var silentLogger = sync.OnceFunc(func() { klog.SetSlogLogger(slog.New(slog.DiscardHandler)) })

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
	failed := func(err error) {
		if !errors.Is(err, context.Canceled) {
			st.set.Failed(s.describeError(err))
		}
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeout(ctx, s.responseTimeout)
			defer cancel()
			o.LabelSelector = s.conf.Selector
			pods, err := s.pods.List(ctx, o)
			if err != nil && !reflectorRecovers(err, false) {
				failed(err)
			}
			return pods, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			ctx, cancel := context.WithTimeout(ctx, watchTimeout(&o)+watchGrace)
			o.LabelSelector = s.conf.Selector
			// It may be answered late, by a proxy with the first event; so it goes on.
			var mu sync.Mutex
			over := false
			late := time.AfterFunc(s.responseTimeout, func() {
				mu.Lock()
				defer mu.Unlock()
				if !over { // or what comes of it has been told
					failed(fmt.Errorf("no answer for %s", s.responseTimeout))
				}
			})
			w, err := s.pods.Watch(ctx, o)
			late.Stop()
			mu.Lock()
			over = true
			mu.Unlock()
			if err != nil {
				cancel()
				if !reflectorRecovers(err, o.SendInitialEvents != nil) {
					failed(err)
				}
				return nil, err
			}
			if _, answered := w.(*watch.StreamWatcher); answered {
				st.clearError()
			} else { // client-go's form of a connection that was lost or could not be made in time
				failed(errors.New("the connection ended before an answer"))
			}
			return &boundedWatch{w, cancel}, nil
		},
	}
}

// watchTimeout is how long the server is asked to let a watch last.
func watchTimeout(o *metav1.ListOptions) time.Duration {
	if o.TimeoutSeconds == nil {
		return time.Hour
	}
	return time.Duration(*o.TimeoutSeconds) * time.Second
}

// boundedWatch is a watch with its deadline, which the reflector stops in any case.
type boundedWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

func (w *boundedWatch) Stop() {
	w.Interface.Stop()
	w.cancel()
}
