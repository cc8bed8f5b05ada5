// A complete webhook receiver using only Go's standard library.
//
//	WEBHOOK_SECRET=whsec_... go run receiver.go
//
// It verifies the signature over the raw bytes, processes each event once however often it arrives, ignores stale sequence
// numbers, and responds fast. During a rotation, set both secrets separated by a comma.
//
// Go's standard library has database/sql, but no driver. Import one below and set WEBHOOK_DRIVER and WEBHOOK_DATABASE.
// Without them ids are kept in memory: enough to try it out, but lost on restart.
package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	// _ "modernc.org/sqlite" // WEBHOOK_DRIVER=sqlite WEBHOOK_DATABASE=receiver.db
)

const (
	toleranceSeconds = 300
	bodyBytesMax     = 1024 * 1024
	headerBytesMax   = 4096
	signaturesMax    = 10
)

type event struct {
	ID       string `json:"id"`
	Type     string `json:"type"`
	Sequence *int64 `json:"sequence"` // Only events with an ordering key have one.
	Data     struct {
		ID string `json:"id"`
	} `json:"data"`
}

// isGenuine reports whether one of the secrets produced one of the signatures in `t=<unix>,v1=<hex>[,v1=<hex>]`, within
// the tolerance.
func isGenuine(header string, body []byte, secrets []string, now int64) bool {
	if len(header) > headerBytesMax {
		return false
	}
	var t string
	var given [][]byte
	for _, part := range strings.Split(header, ",") {
		name, value, _ := strings.Cut(part, "=")
		switch name {
		case "t":
			if t != "" || strings.Trim(value, "0123456789") != "" {
				return false
			}
			t = value
		case "v1":
			signature, err := hex.DecodeString(value)
			if err != nil || len(signature) != sha256.Size {
				return false
			}
			given = append(given, signature)
		}
	}
	at, err := strconv.ParseInt(t, 10, 64)
	if err != nil || at < now-toleranceSeconds || at > now+toleranceSeconds {
		return false
	}
	if len(given) == 0 || len(given) > signaturesMax {
		return false
	}
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(t + "."))
		mac.Write(body)
		expected := mac.Sum(nil)
		for _, signature := range given {
			if hmac.Equal(expected, signature) {
				return true
			}
		}
	}
	return false
}

// A store does the work and remembers the event, atomically. It returns what it did.
type store interface {
	handle(ctx context.Context, e event) (string, error)
}

// sqlStore does both in one transaction of your database. The statements work in SQLite and Postgres.
type sqlStore struct{ db *sql.DB }

func openSQL(driver, source string) (store, error) {
	db, err := sql.Open(driver, source)
	if err != nil {
		return nil, err
	}
	for _, table := range []string{
		"CREATE TABLE IF NOT EXISTS received (id TEXT PRIMARY KEY)",
		"CREATE TABLE IF NOT EXISTS invoices (id TEXT PRIMARY KEY, status TEXT, sequence BIGINT)",
	} {
		if _, err := db.Exec(table); err != nil {
			return nil, err
		}
	}
	return sqlStore{db}, nil
}

func (s sqlStore) handle(ctx context.Context, e event) (string, error) {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return "", err
	}
	defer tx.Rollback() // A no-op after a commit.
	rows, err := affected(tx.ExecContext(ctx, "INSERT INTO received (id) VALUES ($1) ON CONFLICT DO NOTHING", e.ID))
	if err != nil {
		return "", err
	}
	if rows == 0 {
		return "seen before", nil
	}
	// The work. Keep it this small: put anything slow into your own queue, in this transaction.
	rows, err = affected(tx.ExecContext(ctx,
		`INSERT INTO invoices (id, status, sequence) VALUES ($1, $2, $3)
		 ON CONFLICT (id) DO UPDATE
		 SET status = excluded.status, sequence = COALESCE(excluded.sequence, invoices.sequence)
		 WHERE excluded.sequence IS NULL OR excluded.sequence > COALESCE(invoices.sequence, 0)`, e.Data.ID, e.Type, e.Sequence))
	if err != nil {
		return "", err
	}
	done := "handled"
	if rows == 0 {
		done = "stale"
	}
	return done, tx.Commit()
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// memoryStore does the same in memory.
type memoryStore struct {
	lock     sync.Mutex
	received map[string]bool
	sequence map[string]int64
}

func (s *memoryStore) handle(_ context.Context, e event) (string, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.received[e.ID] {
		return "seen before", nil
	}
	s.received[e.ID] = true
	if e.Sequence != nil {
		if *e.Sequence <= s.sequence[e.Data.ID] {
			return "stale", nil
		}
		s.sequence[e.Data.ID] = *e.Sequence
	}
	return "handled", nil
}

func receiver(secrets []string, s store) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyBytesMax))
		var tooLarge *http.MaxBytesError
		switch {
		case errors.As(err, &tooLarge):
			w.WriteHeader(http.StatusRequestEntityTooLarge)
			return
		case err != nil:
			return // The client disconnected.
		case !isGenuine(r.Header.Get("Webhook-Signature"), body, secrets, time.Now().Unix()):
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		var e event
		if err := json.Unmarshal(body, &e); err != nil || e.ID == "" || e.Data.ID == "" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		done, err := s.handle(r.Context(), e)
		if err != nil {
			log.Print(err)
			w.WriteHeader(http.StatusServiceUnavailable) // It will be retried.
			return
		}
		// Anything but 2xx is retried, so return 2xx for duplicates and stale events too.
		w.WriteHeader(http.StatusNoContent)
		fmt.Println(done, e.ID)
	}
}

func main() {
	var secrets []string
	for _, secret := range strings.Split(os.Getenv("WEBHOOK_SECRET"), ",") {
		if secret = strings.TrimSpace(secret); secret != "" {
			secrets = append(secrets, secret)
		}
	}
	if len(secrets) == 0 {
		log.Fatal("WEBHOOK_SECRET is not set")
	}
	var s store = &memoryStore{received: map[string]bool{}, sequence: map[string]int64{}}
	if driver := os.Getenv("WEBHOOK_DRIVER"); driver != "" {
		var err error
		if s, err = openSQL(driver, os.Getenv("WEBHOOK_DATABASE")); err != nil {
			log.Fatal(err)
		}
	} else {
		log.Print("WEBHOOK_DRIVER is not set: ids are kept in memory and lost on restart")
	}
	port := os.Getenv("PORT")
	if port == "" {
		port = "3000"
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("listening on http://" + listener.Addr().String())
	server := http.Server{Handler: receiver(secrets, s), ReadTimeout: 10 * time.Second}
	log.Fatal(server.Serve(listener))
}
