// Every kernel on shapes drawn at random: attention_fuzz_test [cases [seed]].
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "attention_check.h"
#include "cases.h"

namespace wscope {
namespace {

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  int Between(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random_);
  }
  bool OneIn(int n) { return Between(1, n) == 1; }
  // Mostly what tiles and vectors like, sometimes what they do not.
  int Dim(int most) {
    const int step = OneIn(3) ? 1 : OneIn(2) ? 16 : 32;
    return most < step ? Between(1, most) : step * Between(1, most / step);
  }

 private:
  std::mt19937 random_;
};

Case RandomCase(unsigned seed) {
  Draw draw(seed);
  AttentionShape shape;
  shape.num_kv_heads = draw.Between(1, 3);
  shape.num_q_heads = shape.num_kv_heads * draw.Between(1, draw.OneIn(4) ? 70 : 20);
  shape.value_in_key = draw.OneIn(2);
  shape.key_dim = draw.Dim(192);
  shape.value_dim = shape.value_in_key ? draw.Dim(shape.key_dim) : draw.Dim(192);
  if (shape.value_dim > shape.key_dim && shape.value_in_key) shape.value_dim = shape.key_dim;
  shape.block = 32 * draw.Between(1, 5);
  shape.storage = draw.OneIn(2) ? Storage::kFloat32 : Storage::kBfloat16;
  shape.scale = draw.OneIn(2) ? 0.1f : 0.02f * static_cast<float>(draw.Between(1, 20));
  Case test{"seed " + std::to_string(seed), shape, {}};
  for (int rows = draw.Between(1, 3); rows > 0; --rows) {
    test.row_blocks.push_back(draw.OneIn(4) ? 0 : draw.Between(1, 4));
  }
  if (draw.OneIn(6)) test.scores = Scores::kEqual;
  return test;
}

}  // namespace
}  // namespace wscope

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 40;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (int i = 0; i < cases; ++i) {
    const wscope::Case test = wscope::RandomCase(seed + static_cast<unsigned>(i));
    const wscope::AttentionShape& shape = test.shape;
    std::printf("%s: H %d G %d K %d V %d%s D %d %s scale %g\n", test.name.c_str(),
                shape.num_q_heads, shape.num_kv_heads, shape.key_dim, shape.value_dim,
                shape.value_in_key ? " in key" : "", shape.block,
                shape.storage == wscope::Storage::kFloat32 ? "float32" : "bfloat16",
                static_cast<double>(shape.scale));
    std::fflush(stdout);
    for (const wscope::Kernel* kernel : wscope::KernelsToTest()) {
      wscope::TestCase(*kernel, test);
      wscope::TestSelected(*kernel, test);
    }
  }
}
