// A ring under the thread sanitizer: one thread writes records of all sizes, another takes them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../qllm/ingress/csrc/rings.h"

using namespace qllm;

int main(int argc, char** argv) {
  const u64 capacity = 64 * kLine;
  const u32 count = argc > 1 ? u32(atoi(argv[1])) : 20000;
  std::vector<u64> memory(capacity / 8), tail(1);
  RingEnd ends[2] = {};
  for (RingEnd& end : ends) {
    end.bytes = (u64)memory.data();
    end.tail = (u64)tail.data();
    end.capacity = capacity;
  }
  std::thread writing([&] {
    RingWriter writer(&ends[0]);
    std::vector<u8> body(1200);
    for (u32 n = 0; n < count; n++) {
      u32 size = 4 + n * 7919 % 1100;
      memset(body.data(), int(n), size);
      memcpy(body.data(), &n, 4);
      while (!writer.write(n % 5, n % 65536, body.data(), size)) std::this_thread::yield();
    }
  });
  RingReader reader(&ends[1]);
  std::vector<u8> body(capacity);
  for (u32 n = 0; n < count; n++) {
    i64 length;
    while (!(length = reader.look(1))) std::this_thread::yield();
    u32 size = 4 + n * 7919 % 1100, found;
    reader.copy(body.data(), size);
    memcpy(&found, body.data(), 4);
    bool ok = length == i64(Ring::record_bytes(size)) && found == n && reader.kind() == n % 5 &&
              reader.flags() == n % 65536;
    for (u32 i = 4; i < size; i++) ok &= body[i] == u8(n);
    if (!ok) {
      printf("record %u is wrong\n", n);
      return 1;
    }
    reader.take(u64(length));
  }
  writing.join();
  printf("%u records through a ring of %u bytes\n", count, u32(capacity));
  return 0;
}
