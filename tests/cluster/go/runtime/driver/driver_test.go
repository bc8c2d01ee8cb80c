package driver

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// As an H200 with driver 580 has it.
const information = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-b\nBus Location: \t 0000:1b:00.0\nDevice Minor: \t 7\n"

func write(t *testing.T, proc, address, text string) {
	t.Helper()
	folder := filepath.Join(proc, "gpus", address)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "information"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The order is that of the bus, as NVML's, and not that of the minor numbers.
func TestGPUsAreInTheOrderOfTheBus(t *testing.T) {
	proc := t.TempDir()
	write(t, proc, "0000:1b:00.0", information)
	write(t, proc, "0000:1a:00.0", "GPU UUID: GPU-a\nDevice Minor: 9\n")
	gpus, err := Read(proc)
	want := []GPU{{"0000:1a:00.0", "GPU-a", 9}, {"0000:1b:00.0", "GPU-b", 7}}
	if err != nil || !slices.Equal(gpus, want) {
		t.Fatalf("got %v, %v; want %v", gpus, err, want)
	}
	if gpus[1].Node() != "/dev/nvidia7" {
		t.Fatalf("node %s", gpus[1].Node())
	}
}

// No driver is no GPUs, and an entry without its file is a GPU that just went away.
func TestWhatIsNotThereIsNotAnError(t *testing.T) {
	proc := t.TempDir()
	if gpus, err := Read(proc); err != nil || gpus != nil {
		t.Fatalf("without a driver: %v, %v", gpus, err)
	}
	if err := os.MkdirAll(filepath.Join(proc, "gpus", "0000:1a:00.0"), 0o755); err != nil {
		t.Fatal(err)
	}
	if gpus, err := Read(proc); err != nil || gpus != nil {
		t.Fatalf("without information: %v, %v", gpus, err)
	}
}

// Half a GPU must not pass for none.
func TestAnEntryThatSaysTooLittleIsAnError(t *testing.T) {
	for _, text := range []string{"", "GPU UUID: GPU-a\n", "Device Minor: 1\n", "GPU UUID: GPU-a\nDevice Minor: N/A\n"} {
		proc := t.TempDir()
		write(t, proc, "0000:1a:00.0", text)
		if gpus, err := Read(proc); err == nil {
			t.Errorf("%q: got %v and no error", text, gpus)
		}
	}
}
