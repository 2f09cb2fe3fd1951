package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
)

// serviceAccount is the folder in which a pod finds its service account. Tests replace it.
var serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// credentials say how to reach the API server. They hold the names of files rather than the contents,
// which may be replaced at any time.
type credentials struct {
	server         *url.URL
	serverName     string
	insecure       bool
	proxy          *url.URL
	ca, cert, key  material
	token          material
	user, password string
	exec           *execPlugin
}

// material is PEM text or a token, or the file that has it.
type material struct {
	file string
	data []byte
}

func (m material) read() ([]byte, error) {
	if len(m.data) > 0 || m.file == "" {
		return m.data, nil
	}
	return os.ReadFile(m.file)
}

// bearer returns the bearer token, or "" if there is none.
func (c *credentials) bearer(ctx context.Context) (string, error) {
	if c.exec != nil {
		err := c.runPlugin(ctx)
		return c.exec.token, err
	}
	text, err := c.token.read()
	if err != nil {
		return "", fmt.Errorf("cannot read the token: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// podCredentials returns the credentials of the pod that the router runs in, and its namespace.
func podCredentials(wantNamespace bool) (*credentials, string, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, "", errors.New("kube: cannot find the pod's service account: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set; outside a cluster want kube.kubeconfig")
	}
	in := func(name string) string { return filepath.Join(serviceAccount, name) }
	c := &credentials{server: &url.URL{Scheme: "https", Host: net.JoinHostPort(host, port)}, ca: material{file: in("ca.crt")}, token: material{file: in("token")}}
	if _, err := os.Stat(c.token.file); err != nil {
		return nil, "", fmt.Errorf("kube: cannot find the pod's service account: %w; outside a cluster want kube.kubeconfig", err)
	}
	if !wantNamespace {
		return c, "", nil
	}
	text, err := os.ReadFile(in("namespace"))
	if err != nil {
		return nil, "", fmt.Errorf("kube: cannot read the pod's namespace: %w; want kube.namespace", err)
	}
	return c, strings.TrimSpace(string(text)), nil
}

// kubeconfig is what the source reads of a kubeconfig file.
type kubeconfig struct {
	CurrentContext string  `yaml:"current-context"`
	Clusters       []entry `yaml:"clusters"`
	Users          []entry `yaml:"users"`
	Contexts       []entry `yaml:"contexts"`
}

// entry is an entry of one of the three lists of a kubeconfig.
type entry struct {
	Name    string `yaml:"name"`
	Cluster struct {
		Server     string `yaml:"server"`
		CA         string `yaml:"certificate-authority"`
		CAData     string `yaml:"certificate-authority-data"`
		Insecure   bool   `yaml:"insecure-skip-tls-verify"`
		ServerName string `yaml:"tls-server-name"`
		Proxy      string `yaml:"proxy-url"`
		Extensions []struct {
			Name string `yaml:"name"`
		} `yaml:"extensions"`
	} `yaml:"cluster"`
	User struct {
		Token        string         `yaml:"token"`
		TokenFile    string         `yaml:"tokenFile"`
		Cert         string         `yaml:"client-certificate"`
		CertData     string         `yaml:"client-certificate-data"`
		Key          string         `yaml:"client-key"`
		KeyData      string         `yaml:"client-key-data"`
		Username     string         `yaml:"username"`
		Password     string         `yaml:"password"`
		Impersonate  string         `yaml:"as"`
		AuthProvider map[string]any `yaml:"auth-provider"`
		Exec         *execPlugin    `yaml:"exec"`
	} `yaml:"user"`
	Context struct {
		Cluster   string `yaml:"cluster"`
		User      string `yaml:"user"`
		Namespace string `yaml:"namespace"`
	} `yaml:"context"`
}

// find returns the entry with a name.
func find(list []entry, name string) (entry, bool) {
	i := slices.IndexFunc(list, func(e entry) bool { return e.Name == name })
	if i < 0 {
		return entry{}, false
	}
	return list[i], true
}

// fileCredentials returns the credentials and the namespace of a kubeconfig's current context. Its
// errors contain nothing of the file's values, which may be secrets, except names.
func fileCredentials(path string) (*credentials, string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, "", err
	}
	var conf kubeconfig
	if err := yaml.Unmarshal(text, &conf); err != nil {
		at := ""
		var broken yaml.Error // its text may quote a secret
		if errors.As(err, &broken) && broken.GetToken() != nil {
			at = fmt.Sprintf(" at line %d", broken.GetToken().Position.Line)
		}
		return nil, "", fmt.Errorf("it is not a kubeconfig%s; want YAML or JSON with clusters, users and contexts", at)
	}
	at, ok := find(conf.Contexts, conf.CurrentContext)
	if !ok {
		return nil, "", fmt.Errorf("it has no context %q, which current-context names", conf.CurrentContext)
	}
	cluster, ok := find(conf.Clusters, at.Context.Cluster)
	if !ok {
		return nil, "", fmt.Errorf("it has no cluster %q, which its context names", at.Context.Cluster)
	}
	user, ok := find(conf.Users, at.Context.User)
	if !ok && at.Context.User != "" {
		return nil, "", fmt.Errorf("it has no user %q, which its context names", at.Context.User)
	}
	dir := filepath.Dir(path)
	c := &credentials{serverName: cluster.Cluster.ServerName, insecure: cluster.Cluster.Insecure}
	if err := cmp.Or(c.setCluster(dir, &cluster), c.setUser(dir, &user)); err != nil {
		return nil, "", err
	}
	return c, cmp.Or(at.Context.Namespace, "default"), nil
}

func (c *credentials) setCluster(dir string, e *entry) (err error) {
	server := e.Cluster.Server
	if !strings.Contains(server, "://") {
		server = "https://" + server
	}
	// No %w in these two: the text of a URL may contain a password.
	if c.server, err = url.Parse(server); err != nil || c.server.Host == "" || c.server.Scheme != "http" && c.server.Scheme != "https" {
		return errors.New("the server of its cluster is not a URL; want https://HOST:PORT")
	}
	if e.Cluster.Proxy != "" {
		if c.proxy, err = url.Parse(e.Cluster.Proxy); err != nil || c.proxy.Host == "" {
			return errors.New("the proxy-url of its cluster is not a URL; want http://HOST:PORT")
		}
	}
	for _, x := range e.Cluster.Extensions {
		if x.Name == "client.authentication.k8s.io/exec" {
			return errors.New("its cluster has the extensions entry client.authentication.k8s.io/exec, which is not supported; want the settings in the args or env of exec")
		}
	}
	return c.ca.set("certificate-authority-data", dir, e.Cluster.CA, e.Cluster.CAData)
}

func (c *credentials) setUser(dir string, e *entry) error {
	u := &e.User
	switch p := u.Exec; {
	case u.AuthProvider != nil:
		return errors.New("its user has an auth-provider, which is not supported; want token, client-certificate or exec")
	case u.Impersonate != "":
		return errors.New("its user impersonates another (as), which is not supported; want the credentials of an account that may list and watch pods")
	case p == nil:
	case p.Interactive == "Always":
		return errors.New("the exec of its user has the interactiveMode Always, but a router has no terminal; want Never or IfAvailable")
	case p.Command == "" || p.APIVersion != "client.authentication.k8s.io/v1" && p.APIVersion != "client.authentication.k8s.io/v1beta1":
		return errors.New("the exec of its user is incomplete; want a command, and client.authentication.k8s.io/v1 or v1beta1 as apiVersion")
	case strings.Contains(p.Command, "/"):
		p.Command = inFolder(dir, p.Command)
	}
	c.exec, c.user, c.password = u.Exec, u.Username, u.Password
	if c.token.file = inFolder(dir, u.TokenFile); c.token.file == "" { // as in kubectl, the file takes precedence
		c.token.data = []byte(u.Token)
	}
	return cmp.Or(c.cert.set("client-certificate-data", dir, u.Cert, u.CertData), c.key.set("client-key-data", dir, u.Key, u.KeyData))
}

// set takes the two forms of a kubeconfig; field is the name of the one with the data.
func (m *material) set(field, dir, file, data string) (err error) {
	m.file = inFolder(dir, file)
	if m.data, err = base64.StdEncoding.DecodeString(data); err != nil { // without the cause, which may quote it
		return fmt.Errorf("its %s is not base64", field)
	}
	return nil
}

// inFolder returns the path of a file that a kubeconfig names relative to its own folder.
func inFolder(dir, file string) string {
	if file == "" || filepath.IsAbs(file) {
		return file
	}
	return filepath.Join(dir, file)
}

// execPlugin is a program that prints credentials, as cloud providers have one. It belongs to the
// source's goroutine.
type execPlugin struct {
	APIVersion  string   `yaml:"apiVersion"`
	Command     string   `yaml:"command"`
	Args        []string `yaml:"args"`
	ClusterInfo bool     `yaml:"provideClusterInfo"`
	Interactive string   `yaml:"interactiveMode"`
	Env         []struct {
		Name  string `yaml:"name"`
		Value string `yaml:"value"`
	} `yaml:"env"`

	token, cert, key string
	expires          time.Time // zero: until the server refuses them
	valid            bool
}

// execLimit bounds a run of the plugin, and expiryMargin is how long before they expire credentials are
// replaced.
const (
	execLimit    = time.Minute
	expiryMargin = 10 * time.Second
)

// runPlugin gets credentials from the plugin unless those of its last run are valid. What the plugin
// writes to standard error goes to the router's, as with kubectl.
func (c *credentials) runPlugin(ctx context.Context) error {
	p := c.exec
	if p.valid && (p.expires.IsZero() || time.Until(p.expires) > expiryMargin) {
		return nil
	}
	spec := map[string]any{"interactive": false}
	if p.ClusterInfo {
		ca, err := c.ca.read()
		if err != nil {
			return fmt.Errorf("cannot read the certificate authority: %w", err)
		}
		cluster := map[string]any{"server": c.server.String(), "tls-server-name": c.serverName, "insecure-skip-tls-verify": c.insecure, "certificate-authority-data": ca}
		if c.proxy != nil {
			cluster["proxy-url"] = c.proxy.String()
		}
		spec["cluster"] = cluster
	}
	info, err := json.Marshal(map[string]any{"apiVersion": p.APIVersion, "kind": "ExecCredential", "spec": spec})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.Command, p.Args...)
	cmd.WaitDelay = time.Second
	cmd.Env = append(os.Environ(), "KUBERNETES_EXEC_INFO="+string(info))
	for _, v := range p.Env {
		cmd.Env = append(cmd.Env, v.Name+"="+v.Value)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := cmd.Run(); err != nil { // without its output, which may be a secret
		return fmt.Errorf("cannot get credentials from %q: %w", p.Command, err)
	}
	var printed struct {
		Status struct {
			Token   string    `json:"token"`
			Cert    string    `json:"clientCertificateData"`
			Key     string    `json:"clientKeyData"`
			Expires time.Time `json:"expirationTimestamp"`
		} `json:"status"`
	}
	if json.Unmarshal(out.Bytes(), &printed) != nil || printed.Status.Token == "" && printed.Status.Cert == "" {
		return fmt.Errorf("cannot get credentials from %q: it printed none; want an ExecCredential in JSON with a token or a client certificate", p.Command)
	}
	p.token, p.cert, p.key, p.expires, p.valid = printed.Status.Token, printed.Status.Cert, printed.Status.Key, printed.Status.Expires, true
	return nil
}
