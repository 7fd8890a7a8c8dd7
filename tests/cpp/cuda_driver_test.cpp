// What the CUDA driver does where there may be no GPU. What it does with one is
// in tests/gpu.
#include "driver/cuda_driver.h"

#include <gtest/gtest.h>

namespace vmm {
namespace {

TEST(CudaDriver, SaysWhyThereIsNoGpu) {
  std::string why_not;
  const std::unique_ptr<Driver> driver = CudaDriver::make(&why_not);
  if (driver != nullptr) {
    EXPECT_GT(driver->device_count(), 0);
    EXPECT_TRUE(driver->alive());
    GTEST_SKIP() << "there is one";
  }
  EXPECT_TRUE(why_not.find("no NVIDIA driver") == 0 || why_not.find("no usable NVIDIA GPU") == 0) << why_not;
  EXPECT_GT(why_not.size(), 25U) << why_not;
  RecordProperty("why_not", why_not);
}

TEST(CudaDriver, MapsResultsToTheirMeaning) {
  CudaApi api;
  api.cuGetErrorName = [](CUresult, const char** name) {
    *name = "CUDA_ERROR_OF_A_KIND";
    return CUDA_SUCCESS;
  };
  const auto code = [&api](CUresult result) { return api.status(result, "call").code(); };
  EXPECT_EQ(code(CUDA_SUCCESS), StatusCode::ok);
  EXPECT_EQ(code(CUDA_ERROR_OUT_OF_MEMORY), StatusCode::out_of_memory);
  EXPECT_EQ(code(CUDA_ERROR_NOT_READY), StatusCode::not_ready);
  EXPECT_EQ(code(CUDA_ERROR_INVALID_VALUE), StatusCode::invalid_argument);
  EXPECT_EQ(code(CUDA_ERROR_INVALID_HANDLE), StatusCode::invalid_argument);
  EXPECT_EQ(code(CUDA_ERROR_NOT_SUPPORTED), StatusCode::not_supported);
  EXPECT_EQ(code(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED), StatusCode::not_supported);
  EXPECT_EQ(code(CUDA_ERROR_DEINITIALIZED), StatusCode::driver_gone);
  EXPECT_EQ(code(CUDA_ERROR_CONTEXT_IS_DESTROYED), StatusCode::driver_gone);
  EXPECT_EQ(code(CUDA_ERROR_ILLEGAL_ADDRESS), StatusCode::driver_error);
  EXPECT_EQ(api.status(CUDA_ERROR_ILLEGAL_ADDRESS, "cuMemMap").text(), "cuMemMap: CUDA_ERROR_OF_A_KIND (700)");
}

TEST(CudaApi, NamesWhatItLacksForPools) {
  static int symbol = 0;
  CudaApi api;
  EXPECT_EQ(api.find_pool_functions([](const char*) -> void* { return &symbol; }), "");
  EXPECT_NE(api.cuMemPoolCreate, nullptr);
  const auto find = [](const char* name) -> void* {
    const std::string wanted(name);
    return wanted == "cuMemPoolTrimTo" || wanted == "cuMemFreeAsync" ? nullptr : &symbol;
  };
  EXPECT_EQ(api.find_pool_functions(find), "cuMemPoolTrimTo, cuMemFreeAsync");
  EXPECT_EQ(api.cuMemPoolCreate, nullptr) << "all of them, or none";
}

}  // namespace
}  // namespace vmm
