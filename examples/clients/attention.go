// A client of Flashpoint in Go, with only the standard library.
//
//	go run attention.go [URL [KEY]]
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net/http"
	"os"
	"sort"
	"strconv"
	"time"
)

const mediaType = "application/vnd.safetensors"

// Tensor has a shape, and numbers in row-major, little-endian order. DType is a name of safetensors: F32, F16, BF16, I64, …
type Tensor struct {
	DType string
	Shape []int
	Data  []byte
}

// Float32 returns an F32 tensor of numbers.
func Float32(shape []int, numbers ...float32) Tensor {
	var data bytes.Buffer
	binary.Write(&data, binary.LittleEndian, numbers)
	return Tensor{"F32", shape, data.Bytes()}
}

// Float32s returns the numbers of an F32 tensor.
func (t Tensor) Float32s() []float32 {
	numbers := make([]float32, len(t.Data)/4)
	for i := range numbers {
		numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
	}
	return numbers
}

// Tensors and Options have the names of docs/http.md. encoding/json must accept an option's value.
type (
	Tensors map[string]Tensor
	Options map[string]any
)

type entry struct {
	DType   string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

// Encode returns a message: 8 bytes with the length of the JSON, the JSON, then the numbers without gaps.
func Encode(tensors Tensors, options Options) ([]byte, error) {
	metadata := map[string]string{}
	for name, value := range options {
		text, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		metadata[name] = string(text)
	}
	names := make([]string, 0, len(tensors))
	for name := range tensors {
		names = append(names, name)
	}
	sort.Strings(names)
	head, end := map[string]any{"__metadata__": metadata}, 0
	for _, name := range names {
		t := tensors[name]
		head[name] = entry{t.DType, t.Shape, [2]int{end, end + len(t.Data)}}
		end += len(t.Data)
	}
	text, err := json.Marshal(head)
	if err != nil {
		return nil, err
	}
	body := make([]byte, 8, 8+len(text)+end)
	binary.LittleEndian.PutUint64(body, uint64(len(text)))
	body = append(body, text...)
	for _, name := range names {
		body = append(body, tensors[name].Data...)
	}
	return body, nil
}

// Decode returns the tensors and the metadata of a message. The tensors are views of it.
func Decode(body []byte) (Tensors, map[string]string, error) {
	if len(body) < 8 {
		return nil, nil, errors.New("an answer without a head")
	}
	size := binary.LittleEndian.Uint64(body)
	if size > uint64(len(body)-8) {
		return nil, nil, errors.New("an answer that is cut off")
	}
	var head map[string]json.RawMessage
	if err := json.Unmarshal(body[8:8+size], &head); err != nil {
		return nil, nil, err
	}
	tensors, metadata, data := Tensors{}, map[string]string{}, body[8+size:]
	for name, raw := range head {
		if name == "__metadata__" {
			if err := json.Unmarshal(raw, &metadata); err != nil {
				return nil, nil, err
			}
			continue
		}
		var e entry
		if err := json.Unmarshal(raw, &e); err != nil {
			return nil, nil, err
		}
		if e.Offsets[0] < 0 || e.Offsets[0] > e.Offsets[1] || e.Offsets[1] > len(data) {
			return nil, nil, fmt.Errorf("%s is cut off", name)
		}
		tensors[name] = Tensor{e.DType, e.Shape, data[e.Offsets[0]:e.Offsets[1]]}
	}
	return tensors, metadata, nil
}

// Problem is an error or a refusal of the server: RFC 9457.
type Problem struct {
	Status    int
	Code      string
	Detail    string
	RequestID string `json:"request_id"`
	Errors    []struct {
		Loc []any
		Msg string
	}
}

func (p *Problem) Error() string { return fmt.Sprintf("%d %s: %s", p.Status, p.Code, p.Detail) }

// Client calls the server at URL. It sends Key, unless it is empty, as a bearer token.
type Client struct {
	URL, Key string
	Retries  int
}

// Attention returns o, and lse with return_lse, from the tensors q, k, v, …
func (c *Client) Attention(ctx context.Context, tensors Tensors, options Options) (Tensors, error) {
	return c.send(ctx, "/attention", tensors, options)
}

// AttentionGrad returns the gradients that the option grads names, from do, q, k, v, …
func (c *Client) AttentionGrad(ctx context.Context, tensors Tensors, options Options) (Tensors, error) {
	return c.send(ctx, "/attention/grad", tensors, options)
}

// The deadline of ctx is that of the whole call; the server gets it, too.
func (c *Client) send(ctx context.Context, path string, tensors Tensors, options Options) (Tensors, error) {
	body, err := Encode(tensors, options)
	if err != nil {
		return nil, err
	}
	for attempt := 0; ; attempt++ {
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+path, bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		request.Header.Set("Content-Type", mediaType)
		if c.Key != "" {
			request.Header.Set("Authorization", "Bearer "+c.Key)
		}
		if deadline, ok := ctx.Deadline(); ok {
			left := time.Until(deadline).Milliseconds()
			request.Header.Set("X-Timeout-Ms", strconv.FormatInt(max(left, 1), 10))
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return nil, err
		}
		answer, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			return nil, err
		}
		if response.StatusCode == http.StatusOK {
			found, _, err := Decode(answer)
			return found, err
		}
		problem := &Problem{}
		_ = json.Unmarshal(answer, problem) // a proxy's error is not a problem in JSON: then only the status is known
		problem.Status = response.StatusCode
		again := problem.Status == http.StatusTooManyRequests || problem.Status == http.StatusServiceUnavailable
		if !again || attempt >= c.Retries {
			return nil, problem
		}
		seconds, _ := strconv.ParseFloat(response.Header.Get("Retry-After"), 64)
		seconds = math.Max(seconds, 0.1*math.Pow(2, float64(attempt)))
		select {
		case <-time.After(time.Duration(seconds * float64(time.Second))):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func max(a, b int64) int64 { // built in from Go 1.21 on
	if a > b {
		return a
	}
	return b
}

// Two queries and two keys, few enough to compute by hand: the first query sees only the first key, the second both.
func run(client *Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	shape := []int{2, 2}
	q, k := Float32(shape, 1, 0, 0, 1), Float32(shape, 1, 0, 0, 1)
	v, do := Float32(shape, 1, 2, 3, 4), Float32(shape, 1, 1, 1, 1)

	found, err := client.Attention(ctx, Tensors{"q": q, "k": k, "v": v},
		Options{"causal": true, "scale": 0.5, "return_lse": true})
	if err != nil {
		return err
	}
	grads, err := client.AttentionGrad(ctx,
		Tensors{"do": do, "q": q, "k": k, "v": v, "o": found["o"], "lse": found["lse"]},
		Options{"causal": true, "scale": 0.5, "grads": []string{"dq", "dv"}})
	if err != nil {
		return err
	}

	p := 1 / (1 + math.Exp(-0.5)) // the second query's weight of the second key
	g := 4 * 0.5 * p * (1 - p)
	for _, wanted := range []struct {
		name    string
		found   Tensor
		numbers []float64
	}{
		{"o", found["o"], []float64{1, 2, 1 + 2*p, 2 + 2*p}},
		{"lse", found["lse"], []float64{0.5, math.Log(1 + math.Exp(0.5))}},
		{"dq", grads["dq"], []float64{0, 0, -g, g}},
		{"dv", grads["dv"], []float64{2 - p, 2 - p, p, p}},
	} {
		if err := check(wanted.found, wanted.numbers); err != nil {
			return fmt.Errorf("%s %w", wanted.name, err)
		}
		fmt.Println(wanted.name, wanted.found.Shape, "as it must be")
	}

	_, err = client.Attention(ctx, Tensors{"q": q, "k": k, "v": v}, Options{"casual": true})
	var problem *Problem
	if !errors.As(err, &problem) {
		return fmt.Errorf("a misspelt option was not refused: %w", err)
	}
	fmt.Println("refused:", problem)
	return nil
}

func check(t Tensor, expected []float64) error {
	numbers := t.Float32s()
	if len(numbers) != len(expected) {
		return fmt.Errorf("has %d numbers", len(numbers))
	}
	for i, x := range expected {
		if math.Abs(float64(numbers[i])-x) >= 1e-6 {
			return fmt.Errorf("is %v, not %v", numbers, expected)
		}
	}
	return nil
}

func main() {
	log.SetFlags(0)
	client := &Client{URL: "http://localhost:8000", Retries: 4}
	if url := os.Getenv("FLASHPOINT_URL"); url != "" {
		client.URL = url
	}
	if len(os.Args) > 1 {
		client.URL = os.Args[1]
	}
	if len(os.Args) > 2 {
		client.Key = os.Args[2]
	}
	if err := run(client); err != nil {
		log.Fatal(err)
	}
}
