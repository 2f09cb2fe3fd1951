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

// Source watches the pods that match one selector.
type Source struct {
	conf            config.Kube
	namespace       string // "": all namespaces
	server          string // URL of the API server, for errors
	pods            typedcorev1.PodInterface
	responseTimeout time.Duration // after this time without a response a list fails; a watch continues, and a failure is reported
}

const (
	defaultResponseTimeout = 30 * time.Second
	// watchGrace is added to the requested duration of a watch. The server ends the watch; if it
	// does not, the connection may be dead, and the client ends it.
	watchGrace = 30 * time.Second
)

// namespaceFile is the file from which a pod reads its own namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// New reads the credentials from a kubeconfig, or those of the pod that the router runs in. It
// makes no calls: Run reports a cluster that it cannot reach.
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
	if s.server, ok = shown(rc.Host); !ok { // no %q of the host: it may hold a password
		return nil, fmt.Errorf("kube: cannot use the API server's address of %s: it is no URL; want https://HOST:PORT", s.credentialsName())
	}
	client, err := typedcorev1.NewForConfig(rc)
	if err != nil {
		return nil, fmt.Errorf("kube: cannot use the credentials of %s: %w", s.credentialsName(), err)
	}
	s.pods = client.Pods(s.namespace)
	return s, nil
}

// silentLogger turns off client-go's log, which adds nothing to what Run reports to the Set. The
// log is global to the process and running sources read it, so it is set only once.
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

// Run lists and watches pods until ctx ends. The reflector lists them again when the server has
// discarded the watch's position (410 Gone), and backs off after failures.
func (s *Source) Run(ctx context.Context, set *discovery.Set) error {
	st := newStore(&s.conf, s.namespace == metav1.NamespaceAll, set)
	r := cache.NewReflectorWithOptions(s.listWatch(st), &corev1.Pod{}, st, cache.ReflectorOptions{Name: "sluice", TypeDescription: "pods"})
	r.RunWithContext(ctx)
	return nil
}

// listWatch returns the list and watch calls of the reflector. They report failures and recoveries
// to st, because the reflector only retries.
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
			// A slow response is reported but does not end the watch: a proxy may hold the
			// response back until the first event.
			var mu sync.Mutex
			over := false
			late := time.AfterFunc(s.responseTimeout, func() {
				mu.Lock()
				defer mu.Unlock()
				if !over { // otherwise the result of the call has been reported
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
			} else { // client-go returns another type if the connection failed
				failed(errors.New("the connection ended before an answer"))
			}
			return &boundedWatch{w, cancel}, nil
		},
	}
}

// watchTimeout returns the duration of the watch that the reflector requests from the server.
func watchTimeout(o *metav1.ListOptions) time.Duration {
	if o.TimeoutSeconds == nil {
		return time.Hour
	}
	return time.Duration(*o.TimeoutSeconds) * time.Second
}

// boundedWatch is a watch with a deadline. The reflector always calls Stop, which releases the
// deadline's timer.
type boundedWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

func (w *boundedWatch) Stop() {
	w.Interface.Stop()
	w.cancel()
}
